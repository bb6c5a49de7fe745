"""What an engine and its settings and layers must be; knows no engine."""

import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeAlias

from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.versions import Package

__all__ = ["Requirement", "require_parameters", "unmet", "why_not_loaded"]

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


def require_parameters(package: Package, function: Callable[..., Any], expected: str) -> None:
    """Raise UnsupportedError unless ``function`` of the engine has the ``expected`` parameters.

    They are names in order. An adapter that stands in a function's place would take one parameter
    for another without an error where an engine has them in another order.
    """
    taken = " ".join(inspect.signature(function).parameters)
    if taken != expected:
        raise UnsupportedError(
            f"this {package.engine} is not as the adapter needs it: {function.__qualname__} takes "
            f"({', '.join(taken.split())}), not ({', '.join(expected.split())}); "
            f"install {package.requirement}"
        )


def why_not_loaded(package: Package, error: Exception) -> UnsupportedError:
    """Why importing the adapter gave ``error``, which names what has moved in the engine."""
    return UnsupportedError(
        f"this {package.engine} is not one that can be balanced: {error}; "
        f"install {package.requirement}"
    )
