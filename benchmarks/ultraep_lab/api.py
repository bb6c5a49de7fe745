"""Planning, replaying and asking servers from Python; docs/api.md walks through it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraep_lab.comparators import PolicyFunction, policy_function, policy_of
from ultraep_lab.comparators.own import QuotaFunction
from ultraep_lab.imbalance import imbalance
from ultraep_lab.integers import Integers, integers
from ultraep_lab.replay import Replay, compiled_planner, context_of
from ultraep_lab.replay import replay as _replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.replay_output import replay_document
from ultraep_lab.store import load_trace, save_trace
from ultraep_lab.trace import LOADS, LoadTrace, Trace, batches
from ultraep_lab.workload_options import WorkloadOptions as Workload
from ultraep_lab.workloads import make_trace as _make_trace
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.sidecar.status import status
from ultraep_serve.types import IntArray

__all__ = [
    "LayerPlan",
    "LoadTrace",
    "PlanContext",
    "Replay",
    "Trace",
    "Workload",
    "batches",
    "load_trace",
    "make_trace",
    "plan",
    "replay",
    "replay_document",
    "save_trace",
    "status",
]

AnyPolicy = str | PolicyFunction | QuotaFunction


@dataclass(frozen=True)
class LayerPlan:
    """The plans of all ranks for one layer of one batch."""

    slot_expert: IntArray | None  # (R, slots): -1 empty; None where masters moved
    quota: IntArray  # (E, R): assignments of expert e that rank r computes
    shares: IntArray  # (R_source, E, R_target): the same, by the rank whose tokens they are
    imbalance_before: float  # busiest rank over the mean, of time where speeds differ
    imbalance_after: float


def plan(
    loads: Integers | Sequence[Any],
    *,
    ranks: int | None = None,
    slots: int = 2,
    domain_size: int | None = None,
    speeds: Sequence[float] | None = None,
    policy: AnyPolicy = "quota",
    history: Integers | None = None,
) -> LayerPlan:
    """Plan one layer of one batch with the planner that serves, or with another policy.

    The plan is checked.

    Args:
        loads: integers (R, E), row r is what rank r's own tokens chose; or (E,) with ``ranks``,
            where every rank sees the same tokens.
        ranks: R, if ``loads`` does not say.
        slots: replica slots per rank.
        domain_size: copies stay within groups of this many ranks; all by default.
        speeds: how fast ranks are (R,), above 0 and at most 1; equal by default.
        policy: a name, ``FILE.py:NAME`` or a function, as ``replay`` takes them.
        history: loads (N, R, E) of past batches, for policies that look at them.

    Raises:
        ConfigError: ``ranks`` is missing, an option is out of range, or there is no such policy.
        ValueError: another argument is, or a policy's plan breaks a rule.
    """
    counts = integers("loads", loads, (1, 2), LOADS).astype(np.int64)
    if counts.ndim == 1 and ranks is None:
        raise ConfigError("loads (E,) need ranks; or give loads (R, E)")
    if counts.ndim == 2 and ranks not in (None, len(counts)):
        raise ConfigError(f"loads are of {len(counts)} ranks, not {ranks}; leave ranks out")
    wanted: Mapping[str, Any] = {"domain_size": domain_size, "speeds": speeds, "slots": slots}
    options = ReplayOptions(num_ranks=len(counts) if ranks is None else ranks, **wanted)
    if counts.ndim == 1:
        counts = np.vstack([counts, np.zeros((options.num_ranks - 1, counts.size), np.int64)])
    context = context_of(LoadTrace(counts[None, None]), options)
    compiled_planner()
    function = _function(policy)
    past = np.zeros((0, *counts.shape), np.int64) if history is None else history
    made = function(counts, context, past)
    function.check(counts, context, made)
    assert made.shares is not None  # of every call
    return LayerPlan(
        made.slot_expert,
        made.quota,
        made.shares,
        imbalance(context.rank_loads(counts), context.speeds),
        imbalance(made.quota.sum(0, dtype=np.int64), context.speeds),
    )


def make_trace(workload: Workload) -> Trace:
    """Draw every token's experts, as ``make-trace`` does.

    Raises TraceError: too large, or the imbalance cannot be reached.
    """
    return _make_trace(workload.workload())


def replay(
    trace: Trace | LoadTrace, policies: Sequence[AnyPolicy], *, ranks: int, **options: Any
) -> Replay:
    """Plan every layer of every batch of ``trace`` with each policy, and check every plan.

    Args:
        trace: of tokens (``Trace``) or of loads (``LoadTrace``), loaded or made of arrays.
        policies: names, ``FILE.py:NAME``, or functions (loads, context, history) -> quota (E, R).
        ranks: of the expert-parallel group.
        options: fields of ``ReplayOptions``: ``num_slots``, ``batch_tokens``, ``layers``,
            ``limit``, ``domain_size``, ``history_batches``, ``rebalance_every``, ``skip``,
            ``speeds``.

    Raises:
        ConfigError: an unknown policy or option.
        TraceError: the options do not fit the trace.
        PlanError: a policy made a plan that breaks a rule.
    """
    wanted = ReplayOptions(num_ranks=ranks, **options)
    return _replay(trace, wanted, [_function(policy) for policy in policies])


def _function(policy: AnyPolicy) -> PolicyFunction:
    if isinstance(policy, str):
        return policy_function(policy)
    if isinstance(policy, PolicyFunction):
        return policy
    return policy_of(policy, getattr(policy, "__name__", "own"))
