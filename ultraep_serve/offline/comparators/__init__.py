"""Policies by name behind one interface, loads and history -> plan, for comparing and replaying.

What a server can run is ``ultraep_serve.types.Policy``; the same names mean the same algorithms.
``ideal`` is the force-balanced routing that balancers are measured against (arXiv 2606.04101):
assignments dealt to the ranks in turn, as if every rank held every expert, with no replicas and no
regard to where tokens are. No placement does this with the right weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import ConfigError
from ultraep_serve.offline.comparators.exact import place_exact
from ultraep_serve.offline.comparators.llep import place_llep
from ultraep_serve.offline.comparators.lplb import place_lplb
from ultraep_serve.planner.eplb import even_split, place_eplb, place_eplb_slots
from ultraep_serve.planner.placement import (
    Counts,
    Placement,
    PolicyPlan,
    even_shares,
    home_first_shares,
    master_copies,
)
from ultraep_serve.planner.quota import identity_plan, plan_quota
from ultraep_serve.types import ExpertShape, IntArray, Plan

__all__ = ["POLICIES", "PolicyFunction", "place_ideal", "policy_function", "split_ideal"]

Integers = NDArray[np.integer]
Place = Callable[[Counts, ExpertShape, Counts, int], Placement]  # loads, shape, history, domain
Split = Callable[[Counts, Placement], IntArray]


def _home_first(loads: Counts, placement: Placement) -> IntArray:
    return home_first_shares(loads, placement.quota)


@dataclass(frozen=True)
class PolicyFunction:
    """A pure function of the batch's loads and of past ones; the same answer on every rank."""

    name: str
    summary: str  # one line for people who choose
    place: Place  # unchecked: what a rank has to work out before tokens are sent
    split: Split = _home_first  # unchecked: the shares (R, E, R) of a placement
    has_slots: bool = True  # masters stay, so that slot_expert says all

    def __call__(
        self,
        loads: Integers,
        shape: ExpertShape,
        history: Integers,
        *,
        domain_size: int | None = None,
    ) -> PolicyPlan:
        """Plan one layer of one batch for all ranks.

        Args:
            loads: integers (R, E), row r is what rank r's own tokens chose.
            shape: R, E and S.
            history: integers (N, R, E), loads of the N batches before, oldest first; N may be 0.
            domain_size: ranks that reach each other's memory; None is all. Policies that move
                weights within a batch keep copies inside a domain.

        Raises:
            ValueError: an argument is of another shape, negative, too large or not integer.
            UnsupportedError: the policy needs a package that is not installed.
        """
        if domain_size is not None and domain_size < 1:
            raise ValueError(f"{domain_size = } must be at least 1")
        counts = checked_counts(loads, shape)
        past = checked_history(history, shape)
        placement = self.place(counts, shape, past, domain_size or shape.num_ranks)
        return PolicyPlan(placement.slot_expert, placement.quota, self.split(counts, placement))


def policy_function(name: str) -> PolicyFunction:
    """Policy by name. Raises ConfigError naming the legal ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}") from None


def checked_counts(loads: Integers, shape: ExpertShape) -> Counts:
    """Loads (R, E) as int64. Raises ValueError as ``PolicyFunction``."""
    identity_plan(loads, shape, 0)  # checks all that can be wrong with them
    return np.ascontiguousarray(loads, np.int64)


def checked_history(history: Integers, shape: ExpertShape) -> Counts:
    """Past loads (N, R, E) as int64. Raises ValueError as ``PolicyFunction``."""
    expected = (shape.num_ranks, shape.num_logical_experts)
    if (
        history.ndim != 3
        or history.shape[1:] != expected
        or not np.issubdtype(history.dtype, np.integer)
    ):
        raise ValueError(f"history is {history.dtype} {history.shape}, must be (N, *{expected})")
    if history.size and history.min() < 0:
        raise ValueError("history must not be negative")
    return history.astype(np.int64)


def _placement_of(plan: Plan, shape: ExpertShape) -> Placement:
    copies = master_copies(shape)
    ranks, slots = np.nonzero(plan.slot_expert >= 0)
    copies[plan.slot_expert[ranks, slots], ranks] = 1
    return Placement(plan.quota, copies, plan.slot_expert)


def _place_off(loads: Counts, shape: ExpertShape, history: Counts, domain_size: int) -> Placement:
    return _placement_of(identity_plan(loads, shape, 0), shape)


def _place_quota(loads: Counts, shape: ExpertShape, history: Counts, domain_size: int) -> Placement:
    return _placement_of(plan_quota(loads, shape, 0, domain_size=domain_size), shape)


def place_ideal(loads: Counts, shape: ExpertShape, history: Counts, domain_size: int) -> Placement:
    """Arguments as ``PolicyFunction``; only ``loads`` matters."""
    quota = _deal(loads).sum(0, dtype=np.int32)
    return Placement(quota, master_copies(shape), None)


def split_ideal(loads: Counts, placement: Placement) -> IntArray:
    """Shares (R, E, R): the assignments in order, one rank after the other."""
    return _deal(loads)


def _deal(loads: Counts) -> IntArray:
    return even_shares(loads, np.ones(loads.shape[::-1], np.int32))


POLICIES: Mapping[str, PolicyFunction] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            PolicyFunction("off", "every expert on its master", _place_off),
            PolicyFunction("quota", "replicas and quotas by this batch's exact load", _place_quota),
            PolicyFunction(
                "eplb",
                "all experts placed by past load, even split",
                place_eplb,
                even_split,
                has_slots=False,
            ),
            PolicyFunction(
                "eplb-slots",
                "eplb where masters stay and only slots are filled",
                place_eplb_slots,
                even_split,
            ),
            PolicyFunction(
                "lplb",
                "eplb's placement, split by linear programme on this batch",
                place_lplb,
                has_slots=False,
            ),
            PolicyFunction("llep", "least-loaded spill over a threshold", place_llep),
            PolicyFunction("exact", "equal counts on every rank, slots as needed", place_exact),
            PolicyFunction(
                "ideal",
                "force-balanced, for measuring only",
                place_ideal,
                split_ideal,
                has_slots=False,
            ),
        )
    }
)
