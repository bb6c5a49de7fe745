"""The figures of an answer: how unbalanced the ranks were, and what balancing cost and saved.

Imbalance is max/mean of assignments over ranks, per layer and batch. All ranks hold the same loads,
so it is computed from the primary rank's records; bytes and times come from each rank's own.

Time imbalance is the same of times, a rank's assignments over the speed that was planned with: the
busiest rank's time over what it would be if all ended together. Where ranks are equally fast it is
the imbalance.

Savings: a layer is finished when its busiest rank is, so the engine's part of a layer (stage
``compute``: dispatch, expert kernel, combine) took as long as the busiest rank needed for its
assignments. Without balancing it would have taken longer in proportion to the busiest rank's
time by routing alone. This overstates the savings where a part of the engine's time does not
depend on the load.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.sidecar.statistics.snapshot import (
    ImbalanceSnapshot,
    RankAssignments,
    ReplicaCount,
    Savings,
    Spread,
)
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Stage

__all__ = [
    "avoided_seconds",
    "imbalance_snapshot",
    "imbalances",
    "mean_floor",
    "rank_assignments",
    "rank_speeds",
    "replica_count",
    "savings",
    "spent_seconds",
    "spread",
    "time_imbalance_snapshot",
    "time_imbalances",
]

_OWN = [Stage.COUNT, Stage.PLAN, Stage.REPLICATE, Stage.REROUTE, Stage.WAIT]


def imbalances(loads: NDArray[np.integer]) -> NDArray[np.float64]:
    """Max/mean over ranks of each row of ``loads`` (n, R); 1.0 for an empty row."""
    total = loads.sum(axis=1, dtype=np.int64)
    peak = loads.max(axis=1, initial=0).astype(np.float64) * loads.shape[1]
    result: NDArray[np.float64] = np.where(total > 0, peak / np.maximum(total, 1), 1.0)
    return result


def time_imbalances(loads: NDArray[np.integer], speeds: NDArray[np.integer]) -> NDArray[np.float64]:
    """As ``imbalances``, of times: each row of ``loads`` (n, R) over that of ``speeds`` (n, R)."""
    total = loads.sum(axis=1, dtype=np.int64)
    speeds = np.maximum(speeds, 1)  # 0 in a ring that somebody else wrote
    peak = (loads / speeds).max(axis=1, initial=0) * speeds.sum(axis=1, dtype=np.int64)
    result: NDArray[np.float64] = np.where(total > 0, peak / np.maximum(total, 1), 1.0)
    return result


def mean_floor(records: RecordArray, domain_size: int) -> float:
    """The mean over ``records`` of the lowest time imbalance that copies inside domains can reach.

    1.0 where there are none.
    """
    if domain_size == records["load_before"].shape[1] or not len(records):
        return 1.0
    by_domain = (
        records[name].reshape(len(records), -1, domain_size).sum(axis=2, dtype=np.int64)
        for name in ("load_before", "speed")
    )
    return float(time_imbalances(*by_domain).mean())


def spread(values: NDArray[np.floating]) -> Spread:
    """The spread of ``values`` (n,)."""
    if not values.size:
        return Spread(None, None, None, None)
    p50, p99 = np.percentile(values, (50, 99))
    return Spread(float(values.mean()), float(p50), float(p99), float(values.max()))


def imbalance_snapshot(records: RecordArray) -> ImbalanceSnapshot:
    """The imbalance of ``records``."""
    return ImbalanceSnapshot(
        before=spread(imbalances(records["load_before"])),
        after=spread(imbalances(records["load_after"])),
    )


def time_imbalance_snapshot(records: RecordArray) -> ImbalanceSnapshot:
    """The time imbalance of ``records``."""
    return ImbalanceSnapshot(
        before=spread(time_imbalances(records["load_before"], records["speed"])),
        after=spread(time_imbalances(records["load_after"], records["speed"])),
    )


def rank_assignments(records: RecordArray) -> list[RankAssignments]:
    """Assignments of every rank of the whole group, summed over the primary rank's ``records``."""
    before = records["load_before"].sum(axis=0, dtype=np.int64).tolist()
    after = records["load_after"].sum(axis=0, dtype=np.int64).tolist()
    mean = sum(before) / len(before)
    speeds = [1.0] * len(before)
    if len(records):
        speeds = np.round(records["speed"].mean(axis=0) / FULL_SPEED, 4).tolist()
    of_ranks = zip(before, after, speeds, strict=True)
    return [RankAssignments(before, after, mean, speed) for before, after, speed in of_ranks]


def rank_speeds(records: RecordArray) -> list[float]:
    """Speeds of all ranks in the last of ``records``; none where there are no records."""
    speeds: list[float] = (records["speed"][-1:].ravel() / FULL_SPEED).round(4).tolist()
    return speeds


def replica_count(replicas: NDArray[np.integer]) -> ReplicaCount:
    """Mean and maximum of ``replicas`` (n,)."""
    if not len(replicas):
        return ReplicaCount(None, None)
    return ReplicaCount(float(replicas.mean()), int(replicas.max()))


def avoided_seconds(records: RecordArray) -> NDArray[np.float64]:
    """Estimated time that balancing took off each of the primary rank's ``records`` (n,).

    Negative where the busiest rank got more than before.
    """
    before, after = (
        (records[name] * (FULL_SPEED / np.maximum(records["speed"], 1))).max(axis=1, initial=0)
        for name in ("load_before", "load_after")
    )
    seconds = records["stage_ns"][:, Stage.COMPUTE] / 1e9
    avoided: NDArray[np.float64] = seconds * (before / np.maximum(after, 1) - 1) * (after > 0)
    return avoided


def spent_seconds(stage_ns: ArrayLike) -> NDArray[np.float64]:
    """Time that balancing took on the critical path, from the totals ``stage_ns`` (..., R, stages).

    Ranks without any time have no records and are ignored.
    """
    totals = np.asarray(stage_ns, dtype=np.float64)
    own = totals[..., _OWN].sum(axis=-1).max(axis=-1, initial=0)
    waited = np.where(totals.any(axis=-1), totals[..., Stage.EXCHANGE], np.inf)
    least = waited.min(axis=-1, initial=np.inf)
    spent: NDArray[np.float64] = (own + np.where(np.isinf(least), 0, least)) / 1e9
    return spent


def savings(avoided: NDArray[np.float64], spent: float) -> Savings:
    """Totals of ``avoided`` (n,) seconds, and ``spent`` on the stages."""
    saved = float(avoided[avoided > 0].sum())
    spent -= float(avoided[avoided < 0].sum())
    return Savings(saved, spent, saved - spent)
