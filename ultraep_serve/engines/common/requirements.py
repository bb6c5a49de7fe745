"""What an engine's settings and layers must be, as tables; knows no engine."""

from collections.abc import Iterable
from operator import attrgetter
from typing import TypeAlias

__all__ = ["Requirement", "unmet"]

# An attribute's name (dots lead further inside); its valid value, several of them, or a function
# that says whether a value is one; what is wrong with others and what to do, {value} being theirs.
Requirement: TypeAlias = tuple[str, object, str]


def unmet(subject: object, requirements: Iterable[Requirement]) -> str | None:
    """The advice of the first of ``requirements`` that ``subject`` does not meet."""
    for name, valid, advice in requirements:
        value = attrgetter(name)(subject)
        if callable(valid):
            is_met = valid(value)
        else:
            is_met = value in (valid if isinstance(valid, tuple) else (valid,))
        if not is_met:
            return advice.format(value=value)
    return None
