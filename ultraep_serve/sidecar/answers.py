"""JSON answers, computed once for all clients that ask at nearly the same time."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException, Response

from ultraep_serve.sidecar.encoding import encode

__all__ = ["BUSY", "AnswerCache"]

_LOGGER = logging.getLogger(__name__)
_MAX_ANSWERS = 64
_MAX_COMPUTED_AT_ONCE = 2  # more would take the interpreter from those who answer
_MAX_OPEN_QUESTIONS = 32
BUSY = 503  # to who asks one more
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
        content = make()
        self.encoded = content if isinstance(content, bytes) else encode(content)
        self.made_at = began
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
        self._workers = ThreadPoolExecutor(_MAX_COMPUTED_AT_ONCE, "ultraep-questions")
        self._open: dict[Hashable, Future[bytes]] = {}  # questions that are being answered

    def close(self) -> None:
        """Begin no more computations, so that the process can end."""
        for workers in (self._workers, self._background):
            workers.shutdown(wait=False, cancel_futures=True)

    async def give(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """As ``shared``."""
        return Response(await self.shared(key, make), media_type="application/json")

    async def shared(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """As ``encoded``, computed in one of a few threads of its own, first come, first served.

        Raises HTTPException BUSY where too many other questions are open.
        """
        if key in self._answers and (recent := self._recent(self._find(key), make)) is not None:
            return recent
        with self._lock:
            question = self._open.get(key)
            if question is None:
                if len(self._open) >= _MAX_OPEN_QUESTIONS:
                    text = "too many different questions at once; ask again later"
                    raise HTTPException(BUSY, text, {"Retry-After": "1"})
                question = self._open[key] = self._workers.submit(self.encoded, key, make)
        question.add_done_callback(lambda _: self._open.pop(key, None))
        return await asyncio.shield(asyncio.wrap_future(question))

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """What ``make`` returns for ``key``, as JSON unless it is bytes: the last answer if recent
        enough, or a new one.
        """
        answer = self._find(key)
        recent = self._recent(answer, make)
        if recent is not None:
            return recent
        with answer.lock:  # those who wait here use the new answer
            if answer.age() >= self._limit(answer):
                answer.remake(make)
            return answer.encoded

    def _recent(self, answer: _Answer, make: Callable[[], Any]) -> bytes | None:
        """The last answer if recent enough; nobody waits."""
        age, limit = answer.age(), self._limit(answer)
        if age >= limit:
            return None
        if age >= limit / 2 and answer.lock.acquire(blocking=False):
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
            answer = self._answers.pop(key) if key in self._answers else _Answer()
            self._answers[key] = answer  # the last to give way
            if len(self._answers) > _MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            return answer
