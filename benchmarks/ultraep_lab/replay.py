"""Trace and policies -> what each policy would have made of every layer of every batch."""

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host.speeds import whole_speeds

from ultraep_lab.comparators import PolicyFunction
from ultraep_lab.comparators.placement import Counts
from ultraep_lab.errors import PlanError, TraceError
from ultraep_lab.imbalance import domains_of, imbalance
from ultraep_lab.trace import LoadTrace, Trace, batches, num_batches, stated_speeds
from ultraep_serve.costs.model import IntegerCosts, Transfer, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import warm_up
from ultraep_serve.types import ExpertShape

if TYPE_CHECKING:  # needs pydantic, which a bare GPU machine may lack
    from ultraep_lab.replay_options import ReplayOptions

MAX_PLAN_BYTES = 2 << 30  # of one plan's shares
_SILENT_SECONDS = 10.0


@dataclass
class PolicyReplay:
    """What came of one policy; one entry per case, in the order of ``Replay.cases``."""

    imbalance_after: list[float] = field(default_factory=list)
    time_imbalance_after: list[float] = field(default_factory=list)  # the same with equal speeds
    busiest_expert: list[int] = field(default_factory=list)  # rows of the busiest physical one
    num_replicas: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)  # of experts, made in the batch
    slots_needed: list[int] = field(default_factory=list)  # on the rank that needs most
    remote: list[int] = field(default_factory=list)  # assignments computed off their token's rank
    transfers: list[Transfer] = field(default_factory=list)  # of experts, within the batch
    plan_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Replay:
    """All policies on the same cases: batch by batch, layer by layer in each."""

    cases: list[tuple[int, int]]  # (batch, layer)
    assignments: list[int]
    imbalance_before: list[float]  # every expert on its master
    time_imbalance_before: list[float]
    floor: list[float]  # the best imbalance that any plan inside domains can reach
    time_floor: list[float]
    policies: dict[str, PolicyReplay]
    context: PlanContext
    skipped: int  # first batches, which were history only


@dataclass(frozen=True)
class _Case:
    batch: int
    layer: int
    loads: Counts  # (R, E)
    history: Counts  # (N, R, E)
    refreshed: Mapping[int, Counts]  # (1, R, E) by N: of the last batch whose number N divides


def replay(
    trace: Trace | LoadTrace,
    options: "ReplayOptions",
    policies: Sequence[PolicyFunction],
    costs: IntegerCosts | None = None,
) -> Replay:
    """Plan every layer of every batch with every policy.

    Args:
        trace: token level or load level.
        options: ranks, slots, batches.
        policies: each sees the same loads and the same past.
        costs: what those weigh that decide whether copies pay; None: copies cost nothing.

    Raises:
        TraceError: the options do not fit the trace.
        PlanError: a policy made a plan that breaks a rule.
        UnsupportedError: a policy needs a package that is not installed.
    """
    context = context_of(trace, options)
    layers = _layers(trace, options)
    skip = _skipped(trace, options, policies)
    count = _count_batches(trace, options, skip)
    compiled_planner()
    by_count = PlanContext.of(context.shape, context.domain_size)
    replays = {policy.name: PolicyReplay() for policy in policies}
    result = Replay([], [], [], [], [], [], replays, context, skip)
    functions = {
        (policy.name, layer): policy
        if policy.begin is None
        else replace(policy, place=policy.begin(context, layer, costs))
        for policy in policies
        for layer in layers
    }
    intervals = {policy.refreshed_every for policy in policies} - {0}
    for case in _cases(trace, options, layers, range(skip, skip + count), intervals):
        rank_load = context.rank_loads(case.loads)
        result.cases.append((case.batch, case.layer))
        result.assignments.append(int(rank_load.sum()))
        result.imbalance_before.append(imbalance(rank_load))
        result.time_imbalance_before.append(imbalance(rank_load, context.speeds))
        result.floor.append(imbalance_floor(case.loads, by_count))
        result.time_floor.append(imbalance_floor(case.loads, context))
        for policy in policies:
            _plan(functions[policy.name, case.layer], case, context, replays[policy.name])
    return result


@functools.cache
def compiled_planner() -> None:
    """Have the planner compiled, or loaded from disk, and say so where that takes long.

    Once in a process: what was compiled is for all sizes.
    """
    text = "The planner is being compiled, once for this environment; this takes up to a minute.\n"
    told = threading.Timer(_SILENT_SECONDS, sys.stderr.write, [text])
    told.daemon = True
    told.start()
    try:
        warm_up(ExpertShape(2, 4, 1))
    finally:
        told.cancel()


def _plan(policy: PolicyFunction, case: _Case, context: PlanContext, found: PolicyReplay) -> None:
    """Place, with the time that takes, split and check; appends to ``found``."""
    history = case.refreshed.get(policy.refreshed_every, case.history)
    try:
        if not found.plan_seconds and policy.begin is None:  # once before, to have all compiled
            policy(case.loads, context, history)
        start = time.perf_counter()
        placement = policy.place(case.loads, context, history)
        found.plan_seconds.append(time.perf_counter() - start)
        placement = policy.split_up(case.loads, placement)
        policy.check(case.loads, context, placement)
    except ValueError as error:
        raise PlanError(
            f"policy {policy.name}, batch {case.batch}, layer {case.layer}: {error}"
        ) from error
    rank_load = placement.quota.sum(0, dtype=np.int64)
    found.imbalance_after.append(imbalance(rank_load))
    found.time_imbalance_after.append(imbalance(rank_load, context.speeds))
    found.busiest_expert.append(int(placement.quota.max()))
    found.num_replicas.append(placement.num_replicas)
    slots = placement.slot_expert
    masters = context.shape.num_masters
    copied = slots if placement.copied is None else placement.copied
    found.transfers.append(Transfer(0, 0) if copied is None else transfer_of(copied, masters))
    found.copies.append(0 if copied is None else int((copied >= 0).sum()))
    found.slots_needed.append(placement.slots_needed)
    assert placement.shares is not None  # split_up
    kept = np.einsum("ses->", placement.shares, dtype=np.int64)
    found.remote.append(int(case.loads.sum() - kept))


def _cases(
    trace: Trace | LoadTrace,
    options: "ReplayOptions",
    layers: Sequence[int],
    measured: range,
    intervals: Collection[int],
) -> Iterator[_Case]:
    past: deque[Counts] = deque(maxlen=min(options.history_batches, measured.stop))
    known = np.zeros((0, 0, 0, 0), np.int64)
    refreshed: dict[int, Counts] = {}
    for index, loads in enumerate(batches(trace, options.batch_tokens, options.num_ranks)):
        if index == measured.stop:
            return
        chosen = loads[list(layers)].astype(np.int64)
        if index % options.rebalance_every == 0 or index == measured.start:
            known = np.stack(past) if past else np.zeros((0, *chosen.shape), np.int64)
        refreshed |= {every: chosen[:, None] for every in intervals if index % every == 0}
        if index >= measured.start:
            for position, layer in enumerate(layers):
                kept = {every: loads[position] for every, loads in refreshed.items()}
                yield _Case(index, layer, chosen[position], known[:, position], kept)
        past.append(chosen)


def context_of(trace: Trace | LoadTrace, options: "ReplayOptions") -> PlanContext:
    """What plans depend on beside loads. Raises TraceError where ``options`` do not fit."""
    if trace.num_experts % options.num_ranks != 0:
        raise TraceError(
            f"{trace.num_experts} experts cannot be divided by {options.num_ranks} ranks; choose "
            "another --ep, or give --experts if the trace does not use the last ones"
        )
    shape = ExpertShape(options.num_ranks, trace.num_experts, options.num_slots)
    num_bytes = 4 * shape.num_ranks**2 * shape.num_logical_experts  # of the shares (R, E, R)
    if num_bytes > MAX_PLAN_BYTES:
        raise TraceError(f"one plan would take {num_bytes} bytes; choose a smaller --ep")
    return PlanContext.of(shape, options.domain_size, _speeds(trace, options))


def _speeds(trace: Trace | LoadTrace, options: "ReplayOptions") -> Counts | None:
    given = stated_speeds(trace) if options.speeds is None else options.speeds
    if not given:
        return None
    if len(given) != options.num_ranks:
        raise TraceError(
            f"the trace was made for {len(given)} ranks, not all equally fast; give --speeds for "
            f"{options.num_ranks}, or --speeds equal"
        )
    return whole_speeds(given)


def _layers(trace: Trace | LoadTrace, options: "ReplayOptions") -> tuple[int, ...]:
    layers = tuple(range(trace.num_layers)) if options.layers is None else options.layers
    if not layers or min(layers) < 0 or max(layers) >= trace.num_layers:
        raise TraceError(f"layers {list(layers)} must be from 0 to {trace.num_layers - 1}")
    return tuple(dict.fromkeys(layers))


def _skipped(
    trace: Trace | LoadTrace, options: "ReplayOptions", policies: Sequence[PolicyFunction]
) -> int:
    """Batches that are history only: all policies are measured on the same ones."""
    if options.skip is not None:
        return options.skip
    if not any(policy.uses_history for policy in policies):
        return 0
    return min(options.history_batches, num_batches(trace, options.batch_tokens) // 2)


def _count_batches(trace: Trace | LoadTrace, options: "ReplayOptions", skip: int) -> int:
    count = num_batches(trace, options.batch_tokens) - skip
    if count < 1:
        raise TraceError(f"no batch is left to measure after skipping {skip}")
    return count if options.limit is None else min(count, options.limit)


def imbalance_floor(loads: NDArray[np.integer], context: PlanContext) -> float:
    """What the imbalance of no plan can go below, ``loads`` (R, E); of time where speeds differ.

    The largest domain's mean over the global mean, of assignments per speed.
    """
    rank_load, speeds = context.rank_loads(loads), context.speeds
    if not rank_load.any():
        return 1.0
    means = [rank_load[domain].sum() / speeds[domain].sum() for domain in domains_of(context)]
    return float(max(means) / (rank_load.sum() / speeds.sum()))
