"""JSON answers, made once for all who ask within a moment."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

from fastapi import Response
from pydantic import TypeAdapter

__all__ = ["Answers", "encode"]

_MAX_ANSWERS = 64
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # made once per type, which takes milliseconds


class Answers:
    """Encodes answers and reuses them, so that many clients cost little more than one."""

    def __init__(self, reuse_seconds: float) -> None:
        """``reuse_seconds`` is how old an answer may be at most."""
        self._reuse_seconds = reuse_seconds
        self._made: dict[Hashable, tuple[float, bytes]] = {}
        self._lock = threading.Lock()

    def give(self, key: Hashable, make: Callable[[], Any]) -> Response:
        """What ``make`` returned last for ``key``, if that is recent enough, else what it does."""
        return Response(self.encoded(key, make), media_type="application/json")

    def encoded(self, key: Hashable, make: Callable[[], Any]) -> bytes:
        """The same as JSON."""
        with self._lock:  # whoever waits here finds the answer made
            made_at, answer = self._made.get(key, (float("-inf"), b""))
            if time.monotonic() - made_at < self._reuse_seconds:
                return answer
            began = time.monotonic()
            answer = encode(make())
            self._made.pop(key, None)
            self._made[key] = (began, answer)
            if len(self._made) > _MAX_ANSWERS:
                del self._made[next(iter(self._made))]
            return answer


def encode(answer: Any) -> bytes:
    """``answer``, a dataclass, as JSON."""
    kind: type = type(answer)
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind].dump_json(answer)
