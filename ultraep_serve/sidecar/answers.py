"""JSON answers, made once for all who ask within a moment."""

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter

__all__ = ["Answers", "encode", "prepare"]

_MAX_ANSWERS = 64
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # made once per type, which takes milliseconds


@dataclass
class _Answer:
    """The newest answer to one question."""

    made_at: float = float("-inf")  # monotonic
    encoded: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Answers:
    """Encodes answers and reuses them, so that many clients cost little more than one."""

    def __init__(self, reuse_seconds: float) -> None:
        """``reuse_seconds`` is how old an answer may be at most."""
        self._reuse_seconds = reuse_seconds
        self._answers: dict[Hashable, _Answer] = {}
        self._lock = threading.Lock()

    def give(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """What ``make`` returned last for ``key``, if that is recent enough, else what it does."""
        return Response(self.encoded(key, make), media_type="application/json")

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """The same as JSON."""
        answer = self._find(key)
        with answer.lock:  # whoever waits here finds the answer made
            began = time.monotonic()
            if began - answer.made_at >= self._reuse_seconds:
                answer.encoded = encode(make())
                answer.made_at = began
            return answer.encoded

    def _find(self, key: Hashable) -> _Answer:
        with self._lock:
            answer = self._answers.setdefault(key, _Answer())
            if len(self._answers) > _MAX_ANSWERS:
                del self._answers[next(iter(self._answers))]
            return answer


def encode(answer: Any) -> bytes:
    """``answer``, a dataclass, as JSON."""
    return _adapter(type(answer)).dump_json(answer)


def prepare(answer_types: Iterable[type]) -> None:
    """Build the encoders of ``answer_types``, for which the first to ask would wait."""
    for answer_type in answer_types:
        _adapter(answer_type)


def _adapter(answer_type: type) -> TypeAdapter[Any]:
    if answer_type not in _ADAPTERS:
        _ADAPTERS[answer_type] = TypeAdapter(answer_type)
    return _ADAPTERS[answer_type]
