"""The part of one core that requests take, whatever is asked: the rest is the engine's."""

import asyncio
import math
import threading
import time
from pathlib import Path

__all__ = ["Budget", "Turns", "core_seconds"]

_OPERATORS = ("/healthz", "/readyz", "/metrics", "/v1/control", "/v1/record")
_OPERATORS_SECONDS = 0.5  # that they wait at most; a probe of Kubernetes gives up after a second
_LONGEST_SECONDS = 1.5  # that others do, less than a server waits for requests when it is stopped
_WAITING_WEIGHT = 8
_OWN_TIMES = Path("/proc/thread-self/schedstat")


def core_seconds() -> float:
    """Seconds that this thread has computed, and eight times those it has waited for a core.

    So a budget of them is spent the faster the more others need the cores: a thread that gets a
    fifth of a core, as at a low priority beside an engine that keeps all busy, may compute for a
    33rd of what it may where a core is free. Where the kernel does not show how long it has
    waited, only what it has computed counts.
    """
    try:
        computed, waited, _ = _OWN_TIMES.read_text().split()
        return (int(computed) + _WAITING_WEIGHT * int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


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
        self._spent: float | None = None  # by that thread, until the last request

    async def wait(self, path: str) -> None:
        """Return when a request for ``path`` may be answered; operators wait for less."""
        spent = core_seconds()
        self._budget.spend(spent - (spent if self._spent is None else self._spent))
        self._spent = spent
        if pause := self._budget.pause(time.monotonic()):
            is_urgent = path.startswith(_OPERATORS)
            await asyncio.sleep(min(pause, _OPERATORS_SECONDS) if is_urgent else pause)
