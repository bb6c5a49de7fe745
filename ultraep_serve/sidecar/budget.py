"""The part of one core that requests take, whatever is asked: the rest is the engine's."""

import asyncio
import math
import threading
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Budget", "Turns", "cost_since", "own_time"]

_OPERATORS = ("/healthz", "/readyz", "/metrics", "/v1/control", "/v1/record")
_OPERATORS_SECONDS = 0.5  # that they wait at most; a probe of Kubernetes gives up after a second
_LONGEST_SECONDS = 1.5  # that others do, less than a server waits for requests when it is stopped
_WAITING_WEIGHT, _MOST_WAITING = 4, 4
_OWN_TIMES = Path("/proc/thread-self/schedstat")


class OwnTime(NamedTuple):
    """Of the thread that asks, in seconds."""

    computed: float
    waited: float  # for a core; 0 where the kernel does not show it


def own_time() -> OwnTime:
    """Until now."""
    try:
        computed, waited, _ = _OWN_TIMES.read_text().split()
        return OwnTime(int(computed) / 1e9, int(waited) / 1e9)
    except (OSError, ValueError):
        return OwnTime(time.thread_time(), 0.0)


def cost_since(start: OwnTime) -> float:
    """What this thread has spent of a budget: seconds of computing, and four for each of waiting.

    So a budget is spent the faster the more others need the cores. Beside an engine that keeps all
    busy, 17 seconds are spent for one of computing. A thread that wakes often and computes little
    waits much longer than that, for which others should not have to wait: that does not count.
    """
    now = own_time()
    computed = now.computed - start.computed
    return computed + _WAITING_WEIGHT * min(now.waited - start.waited, _MOST_WAITING * computed)


class Budget:
    """Seconds of computing that may be spent: ``share`` of the time that passes.

    What was not spent is saved, up to ``most`` seconds. What was spent beyond is made up for, as
    far as that takes ``longest`` seconds.
    """

    def __init__(self, share: float, most: float = 0.25, longest: float = math.inf) -> None:
        self._share, self._most, self._most_owed = share, most, share * longest
        self._left, self._at = most, 0.0
        self._lock = threading.Lock()

    def pause(self, now: float) -> float:
        """Seconds to wait, at ``now``, until something may be spent."""
        with self._lock:
            self._left = min(self._most, self._left + self._share * (now - self._at))
            self._at = now
            return max(0.0, -self._left / self._share)

    def spend(self, seconds: float) -> None:
        """``seconds`` were spent, perhaps more than were left."""
        with self._lock:
            self._left = max(-self._most_owed, self._left - seconds)


class Turns:
    """When the thread that reads requests goes on with the next one."""

    def __init__(self, share: float) -> None:
        """It takes ``share`` of a core."""
        self._budget = Budget(share, longest=_LONGEST_SECONDS)
        self._start: OwnTime | None = None  # of that thread, at the last request

    async def wait(self, path: str) -> None:
        """Return when a request for ``path`` may be answered; operators wait for less."""
        if self._start is not None:
            self._budget.spend(cost_since(self._start))
        self._start = own_time()
        if pause := self._budget.pause(time.monotonic()):
            is_urgent = path.startswith(_OPERATORS)
            await asyncio.sleep(min(pause, _OPERATORS_SECONDS) if is_urgent else pause)
