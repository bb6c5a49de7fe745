"""JSON answers, computed once for all clients that ask at nearly the same time."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import HTTPException, Response

from ultraep_serve.sidecar.budget import Budget, cost_since, own_time
from ultraep_serve.sidecar.statistics.held import NoAnswerError

__all__ = ["BUSY", "AnswerCache"]

_LOGGER = logging.getLogger(__name__)
_MAX_ANSWERS = 64
_MAX_OPEN_QUESTIONS = 32
BUSY = 503  # to who asks one more
_REUSE_FACTOR, _MAX_REUSE_SECONDS = 8, 2.0


@dataclass(frozen=True)
class _Answer:
    """The newest answer to one question."""

    made_at: float  # monotonic, when computing it began
    took: float  # seconds
    content: bytes


class AnswerCache:
    """Encodes answers and reuses them, so that many clients cost little more than one."""

    def __init__(
        self, reuse_seconds: float, *, at_once: int = 1, budget: Budget | None = None
    ) -> None:
        """An answer may be ``reuse_seconds`` old, or eight times as old as computing it takes, up
        to two seconds.

        From half that age on it is computed again in the background, so that under load no client
        waits for it. ``at_once`` answers are computed, within ``budget``; None: without limit.
        """
        self._reuse_seconds = reuse_seconds
        self._budget = budget
        self._threads = CapacityLimiter(at_once)
        self._answers: dict[Hashable, _Answer] = {}
        self._open: dict[Hashable, asyncio.Task[bytes]] = {}  # questions that are being answered

    async def give(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """As ``encoded``."""
        return Response(await self.encoded(key, make), media_type="application/json")

    async def encoded(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """What ``make`` returns for ``key``, as JSON unless it is bytes: the last answer if recent
        enough, or a new one; first come, first served.

        Raises HTTPException BUSY where too many other questions are open.
        """
        if answer := self._answers.get(key):
            age, limit = time.monotonic() - answer.made_at, self._limit(answer)
            if limit / 2 <= age < limit and key not in self._open and not self._is_full():
                self._begin(key, make)
            if age < limit:
                return answer.content
        if key not in self._open and self._is_full():
            text = "too many different questions at once; ask again later"
            raise HTTPException(BUSY, text, {"Retry-After": "1"})
        return await asyncio.shield(self._open.get(key) or self._begin(key, make))

    def _is_full(self) -> bool:
        return len(self._open) >= _MAX_OPEN_QUESTIONS

    def _limit(self, answer: _Answer) -> float:
        if not self._reuse_seconds:
            return 0.0
        return max(self._reuse_seconds, min(_MAX_REUSE_SECONDS, _REUSE_FACTOR * answer.took))

    def _begin(self, key: Hashable, make: Callable[[], Any]) -> asyncio.Task[bytes]:
        task = self._open[key] = asyncio.create_task(self._answer(key, make))
        task.add_done_callback(lambda _: self._close(key, task))
        return task

    def _close(self, key: Hashable, task: asyncio.Task[bytes]) -> None:
        """Forget the question, and an answer that holds no longer; perhaps nobody waits for it."""
        self._open.pop(key, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._answers.pop(key, None)
        if error is not None and not isinstance(error, (NoAnswerError, HTTPException)):
            _LOGGER.warning("an answer could not be computed: %r", error)

    async def _answer(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        answer = await to_thread.run_sync(
            self._compute, make, limiter=self._threads, abandon_on_cancel=True
        )
        self._answers.pop(key, None)
        self._answers[key] = answer  # the last to give way
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return answer.content

    def _compute(self, make: Callable[[], Any]) -> _Answer:
        if self._budget:
            time.sleep(self._budget.pause(time.monotonic()))
        began, start = time.monotonic(), own_time()
        try:
            answer = make()
            content = answer if isinstance(answer, bytes) else answer.model_dump_json().encode()
        finally:
            if self._budget:
                self._budget.spend(cost_since(start))
        return _Answer(began, time.monotonic() - began, content)
