"""What an engine and its settings and layers must be; knows no engine."""

import inspect
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel, Transfer, saved_picoseconds
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.versions import Package
from ultraep_serve.types import SpeedSource, parse_speeds

if TYPE_CHECKING:  # more than an engine's other processes need
    from ultraep_serve.balance.backend import GroupSetup

__all__ = [
    "Requirement",
    "require_large_batches",
    "require_parameters",
    "unmet",
    "why_never_balanced",
    "why_not_loaded",
]

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


def require_large_batches(config: BalanceConfig, largest_batch: int | None) -> None:
    """Raise UnsupportedError where even the largest batch is left alone, as decode is.

    It has ``largest_batch`` tokens over all ranks; None: the engine sets no bound.
    """
    if largest_batch is not None and largest_batch < config.min_batch_tokens:
        raise UnsupportedError(
            f"no batch has --min-batch-tokens {config.min_batch_tokens} tokens: the largest that "
            f"the engine schedules has {largest_batch} over all ranks; choose --min-batch-tokens "
            f"{largest_batch} or less"
        )


def why_never_balanced(setup: "GroupSetup", costs: CostModel, largest_batch: int | None) -> str:
    """What keeps every layer at home, whatever its load, and what to do; empty: nothing does.

    ``largest_batch`` in assignments over all ranks; None: the engine sets no bound.
    """
    config, shape, domain_size = setup.config, setup.shape, setup.location.domain_size
    if domain_size == 1:
        return (
            "every domain has one rank, so there is nowhere to copy experts to; start more ranks "
            "by one ultraep-serve, or choose a larger --domain-size"
        )
    if not shape.num_replica_slots:
        return "without replica slots there is no room for copies; choose --slots 1 or more"
    speeds = parse_speeds(config.speeds) or (1.0,) * shape.num_ranks
    worst = sum(speeds) / min(speeds)  # all assignments on the slowest rank
    if config.speeds != SpeedSource.AUTO.value and config.max_imbalance >= worst:
        return (
            f"no load is more uneven than {worst:.3g}, and up to --max-imbalance "
            f"{config.max_imbalance:g} all are left alone; choose less"
        )
    if largest_batch is None:
        return ""
    loads, one_expert = (largest_batch, -(-largest_batch // domain_size)), Transfer(1, 1)
    if saved_picoseconds(*loads, shape, one_expert, costs.integer_costs()) > 0:
        return ""
    return (
        "by the costs that were measured or given, copying one expert takes longer than it could "
        f"save in the largest batch, of {largest_batch} assignments; let the engine schedule more "
        "tokens at once"
    )
