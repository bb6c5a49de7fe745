"""JSON answers, computed once for all clients that ask at nearly the same time."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response

from ultraep_serve.sidecar.encoding import encode

__all__ = ["AnswerCache"]

_LOGGER = logging.getLogger(__name__)
_MAX_ANSWERS = 64
_REUSE_FACTOR, _MAX_REUSE_SECONDS = 8, 2.0


@dataclass
class _Answer:
    """The newest answer to one question."""

    made_at: float = float("-inf")  # monotonic, when computing it began
    took: float = 0.0  # seconds
    encoded: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def age(self) -> float:
        """Seconds since ``made_at``."""
        return time.monotonic() - self.made_at

    def remake(self, make: Callable[[], Any]) -> None:
        """Compute it again; the caller holds the lock."""
        began = time.monotonic()
        self.encoded, self.made_at = encode(make()), began
        self.took = time.monotonic() - began


class AnswerCache:
    """Encodes answers and reuses them, so that many clients cost little more than one."""

    def __init__(self, reuse_seconds: float) -> None:
        """An answer may be ``reuse_seconds`` old, or eight times as old as computing it takes, up
        to two seconds.

        From half that age on it is computed again in the background, so that under load no client
        waits for it.
        """
        self._reuse_seconds = reuse_seconds
        self._answers: dict[Hashable, _Answer] = {}
        self._lock = threading.Lock()
        self._background = ThreadPoolExecutor(1, "ultraep-answers")

    def give(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """What ``make`` returns for ``key``: the last answer if recent enough, else a new one."""
        return Response(self.encoded(key, make), media_type="application/json")

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """The same as JSON."""
        answer = self._find(key)
        if answer.age() >= self._limit(answer):
            with answer.lock:  # those who wait here use the new answer
                if answer.age() >= self._limit(answer):
                    answer.remake(make)
        elif answer.age() >= self._limit(answer) / 2 and answer.lock.acquire(blocking=False):
            self._background.submit(self._remake, answer, make)
        return answer.encoded

    def _limit(self, answer: _Answer) -> float:
        if not self._reuse_seconds:
            return 0.0
        return max(self._reuse_seconds, min(_MAX_REUSE_SECONDS, _REUSE_FACTOR * answer.took))

    @staticmethod
    def _remake(answer: _Answer, make: Callable[[], Any]) -> None:
        try:
            answer.remake(make)
        except Exception:
            _LOGGER.exception("an answer could not be computed")
        finally:
            answer.lock.release()

    def _find(self, key: Hashable) -> _Answer:
        with self._lock:
            answer = self._answers.setdefault(key, _Answer())
            if len(self._answers) > _MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            return answer
