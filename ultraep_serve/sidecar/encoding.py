"""Answers as JSON; needs no web framework."""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

__all__ = ["encode", "prepare"]

_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # building one takes milliseconds


def encode(answer: Any) -> bytes:
    """``answer``, a dataclass, as JSON."""
    return _adapter(type(answer)).dump_json(answer)


def prepare(answer_types: Iterable[type]) -> None:
    """Build the encoders of ``answer_types``, so that the first client does not wait for them."""
    for answer_type in answer_types:
        _adapter(answer_type)


def _adapter(answer_type: type) -> TypeAdapter[Any]:
    if answer_type not in _ADAPTERS:
        _ADAPTERS[answer_type] = TypeAdapter(answer_type)
    return _ADAPTERS[answer_type]
