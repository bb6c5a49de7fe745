"""Policies by name behind one interface, loads and history -> plan, for comparing and replaying.

What a server can run is ``ultraep_serve.types.Policy``; the same names mean the same algorithms.
With ``eplb`` every expert may move, over all ranks even where domains are smaller: its weights move
between batches. It is planned anew before every batch; deployments do so every thousand steps or
more, so its figures here are optimistic.
``ideal`` is the force-balanced routing that balancers are compared with (arXiv 2606.04101):
assignments dealt to the ranks in turn, without replicas and wherever tokens are; no placement does
that with the right weights. ``quota-every-N`` is what integrations do that plan every N batches:
replicas and proportions come from the exact load of one batch, and the batches after it keep them.

``staying`` is ``quota`` where slots are each layer's own, as servers on CPUs have them.

``quota``, ``staying`` and ``ideal`` know how fast ranks are; to the others, as published, all ranks
are alike.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from ultraep_kernels.contract import Prices

from ultraep_lab.comparators import own
from ultraep_lab.comparators.eplb import eplb_copies
from ultraep_lab.comparators.llep import place_llep
from ultraep_lab.comparators.lplb import place_lplb
from ultraep_lab.comparators.placement import (
    Counts,
    Placement,
    even_shares,
    home_first_shares,
    of_copies,
    of_plan,
)
from ultraep_lab.integers import Integers, integers
from ultraep_lab.trace import LOADS
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.checks import (
    check_home_first,
    check_slots,
    check_split,
    copies_of,
    master_copies,
)
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.plan.residents import Residents, prices_of
from ultraep_serve.types import ExpertShape, IntArray

Place = Callable[[Counts, PlanContext, Counts], Placement]  # of loads, context and history
Begin = Callable[[PlanContext, int, IntegerCosts | None], Place]  # context, layer, costs
Split = Callable[[Counts, Placement], IntArray]  # shares (R, E, R) of loads and placement

_TURNS = 256  # of the fastest rank under policy ideal, until all ranks begin anew


def _home_first(loads: Counts, placement: Placement) -> IntArray:
    return home_first_shares(loads, placement.quota)


def _evenly(loads: Counts, placement: Placement) -> IntArray:
    return even_shares(loads, placement.copies)


@dataclass(frozen=True)
class PolicyFunction:
    """A pure function of the batch's loads and of past ones; the same answer on every rank."""

    name: str
    summary: str  # one line for people who choose
    place: Place  # what a rank has to work out before tokens are sent; arguments unchecked
    split: Split = _home_first
    takes_any_slots: bool = False  # as many as its plan needs
    uses_history: bool = False
    begin: Begin | None = None  # makes ``place`` for the batches of a layer, one after the other
    refreshed_every: int = 0  # N: its history is the last batch, or this, whose number N divides

    def __call__(self, loads: Integers, context: PlanContext, history: Integers) -> Placement:
        """Plan one layer of one batch for all ranks.

        Args:
            loads: integers (R, E), row r is what rank r's own tokens chose.
            context: policies that move weights within a batch keep copies inside its domains.
            history: integers (N, R, E), loads of the N batches before, oldest first; N may be 0.

        Raises:
            ValueError: an argument is of another shape, negative, too large or not integer.
            UnsupportedError: the policy needs a package that is not installed.
        """
        _place_off(loads, context, history)  # checks them
        past = _checked_history(history, context.shape)
        counts = np.ascontiguousarray(loads, np.int64)
        return self.split_up(counts, self.place(counts, context, past))

    def split_up(self, loads: Counts, placement: Placement) -> Placement:
        """The ``placement`` of ``loads`` (R, E) with shares."""
        return replace(placement, shares=self.split(loads, placement))

    def check(self, loads: Counts, context: PlanContext, placement: Placement) -> None:
        """Check a placement with shares. Raises ValueError that names a rule of this policy."""
        copies, slots, shares = placement.copies, placement.slot_expert, placement.shares
        assert shares is not None, "split_up comes first"
        if slots is not None:
            check_slots(slots, context)
            copies = copies_of(slots, context.shape)
        if placement.slots_needed > context.shape.num_replica_slots and not self.takes_any_slots:
            raise ValueError("broken plan: a rank holds more experts than it has room for")
        if self.split is _as_dealt:
            copies = np.ones_like(copies)  # as if every rank held every expert
        check_split(loads, copies, placement.quota, shares)
        if self.split is _home_first:
            check_home_first(loads, placement.quota, shares)


def policy_function(name: str) -> PolicyFunction:
    """Policy by name: one of POLICIES, or ``FILE.py:NAME``.

    ``quota-every-N`` is ``quota`` whose replicas stay for N batches. Raises ConfigError naming the
    valid ones.
    """
    if name in POLICIES:
        return POLICIES[name]
    if (refreshed := re.fullmatch(r"quota-every-([1-9]\d{0,5})", name)) is not None:
        return _refreshed(int(refreshed[1]))
    if ":" in name:
        return policy_of(own.from_file(name), Path(name).name)
    known = ", ".join([*POLICIES, "quota-every-N"])
    raise ConfigError(f"unknown policy {name!r}; choose from {known}, or write FILE.py:NAME")


def policy_of(function: own.QuotaFunction, name: str) -> PolicyFunction:
    """A user's policy as the others are: tokens stay on their rank where its quota allows."""
    summary = (function.__doc__ or "").strip().partition("\n")[0]
    return PolicyFunction(name, summary, own.place_by(function), uses_history=True)


def _checked_history(history: Integers, shape: ExpertShape) -> Counts:
    past = integers("history", history, (3,), LOADS).astype(np.int64)
    if past.shape[1:] != (expected := (shape.num_ranks, shape.num_logical_experts)):
        raise ValueError(f"history is {past.shape}, must be (N, *{expected})")
    return past


def _place_off(loads: Integers, context: PlanContext, history: Integers) -> Placement:
    alone = PlanContext.of(context.shape, 1)  # nothing can be copied
    return of_plan(plan_quota(loads, alone, 0), context.shape)


def _place_quota(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    return of_plan(plan_quota(loads, context, 0), context.shape)


def _begin_staying(context: PlanContext, layer: int, costs: IntegerCosts | None) -> Place:
    residents = Residents(context.shape, layer)
    prices = Prices() if costs is None else prices_of(costs, context.shape)

    def place(loads: Counts, context: PlanContext, history: Counts) -> Placement:
        plan = residents.plan(loads, context, 0, prices)
        residents.take(plan)
        return replace(of_plan(plan, context.shape), copied=plan.copied)

    return place


def _place_staying(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """A layer's first batch."""
    return _begin_staying(context, 0, None)(loads, context, history)


def _refreshed(every: int) -> PolicyFunction:
    summary = f"quota's replicas and proportions of every {every}th batch, kept until the next"
    return PolicyFunction(f"quota-every-{every}", summary, _place_kept, refreshed_every=every)


def _place_kept(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    """The plan of the last of ``history``, its quotas in proportion to the ``loads``."""
    if not len(history):
        return _place_off(loads, context, history)
    kept = _place_quota(history[-1], context, history)
    planned, now = kept.quota.astype(np.int64), loads.sum(0)[:, None]
    weight = np.where(planned.any(1, keepdims=True), planned, master_copies(context.shape))
    reached = weight.cumsum(1) * now // weight.sum(1, keepdims=True)
    quota = np.diff(reached, axis=1, prepend=0).astype(np.int32)
    return replace(kept, quota=quota)


def _place_eplb(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    return of_copies(loads, eplb_copies(history, context))


def _place_ideal(loads: Counts, context: PlanContext, history: Counts) -> Placement:
    shares = _dealt(loads, context)
    return Placement(shares.sum(0, dtype=np.int32), master_copies(context.shape), shares=shares)


def _dealt(loads: Counts, context: PlanContext) -> IntArray:
    """Shares (R, E, R): the assignments in order, ranks take turns as often as they are fast."""
    if (context.speeds == context.speeds[0]).all():
        return even_shares(loads, np.ones(loads.shape[::-1], np.int32))
    speeds = context.speeds
    turns = np.maximum(_TURNS * speeds // speeds.max(), 1)
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in turns])
    ranks = np.repeat(np.arange(speeds.size), turns)[np.argsort(place, kind="stable")]
    taken = np.zeros((ranks.size + 1, speeds.size), np.int64)  # by each rank in the first n turns
    taken[1:] = (ranks[:, None] == np.arange(speeds.size)).cumsum(0)
    before = np.append(0, loads.T.cumsum())  # expert by expert, source by source
    dealt = before[:, None] // ranks.size * turns + taken[before % ranks.size]
    shares = np.diff(dealt, axis=0).astype(np.int32).reshape(*loads.T.shape, speeds.size)
    return np.ascontiguousarray(shares.transpose(1, 0, 2))


def _as_dealt(loads: Counts, placement: Placement) -> IntArray:
    assert placement.shares is not None  # _place_ideal
    return placement.shares


_STAYS = "quota, whose replicas stay in slots of each layer's own"
_ALL = (
    PolicyFunction("off", "every expert on its master", _place_off),
    PolicyFunction("quota", "replicas and quotas from this batch's exact load", _place_quota),
    PolicyFunction("staying", _STAYS, _place_staying, begin=_begin_staying),
    PolicyFunction("eplb", "all experts placed by past load, even split", _place_eplb, _evenly,
                   uses_history=True),
    PolicyFunction("lplb", "eplb's placement, split by a linear programme", place_lplb,
                   uses_history=True),
    PolicyFunction("llep", "spill from ranks above a threshold to the least loaded", place_llep,
                   takes_any_slots=True),
    PolicyFunction("ideal", "forced balance, for measuring only", _place_ideal, _as_dealt),
)  # fmt: skip
POLICIES: Mapping[str, PolicyFunction] = MappingProxyType({policy.name: policy for policy in _ALL})
