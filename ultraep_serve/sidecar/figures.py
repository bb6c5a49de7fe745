"""Figures of some rows, which answers about layers, batches and the whole window share.

Imbalance is max/mean of assignments over ranks, per layer and batch. Time imbalance has the speeds
of ranks as weights: the busiest rank's time over what it would be if all ended together. Where
ranks are equally fast both are the same.

Savings: a layer is finished when its busiest rank is, so the engine's part of a layer (stage
``compute``: dispatch, expert kernel, combine) took as long as the busiest rank needed for its
assignments. Without balancing it would have taken longer in proportion to the busiest rank's
time by routing alone. This overstates the savings where a part of the engine's time does not
depend on the load.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.sidecar.documents import Answer
from ultraep_serve.sidecar.window import Rows
from ultraep_serve.types import Decision, Stage

_OWN_STAGES = [Stage.COUNT, Stage.PLAN, Stage.REPLICATE, Stage.REROUTE, Stage.WAIT]


class Spread(Answer):
    """Mean, percentiles and maximum of some values; all null where there were none."""

    mean: float | None = None
    p50: float | None = None
    """Median."""
    p99: float | None = None
    """99th percentile, interpolated linearly."""
    max: float | None = None

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """That of ``values`` (n,)."""
        if not len(values):
            return cls()
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return cls(mean=float(values.mean()), p50=p50, p99=p99, max=float(values.max()))


class ImbalanceSnapshot(Answer):
    """Max/mean over ranks, of assignments or times, one value per MoE layer of a batch; 1.0 is
    perfect."""

    before: Spread
    """By routing alone, every token going to its expert's home rank."""
    after: Spread
    """As computed, with replicas."""

    @classmethod
    def of(cls, rows: Rows, kind: str = "") -> Self:
        """Of assignments in ``rows``, or with kind ``time_`` of times."""
        before, after = (Spread.of(rows[f"{kind}{when}"]) for when in ("before", "after"))
        return cls(before=before, after=after)


class ReplicaCount(Answer):
    """Replicas that compute, per layer and batch, over all ranks."""

    mean: float | None
    max: int | None
    new: float | None
    """Mean of experts that were copied in the batch, a few for batches to come only; replicas that
    were not stayed from batches before."""


class WindowFigures(Answer):
    """Some layers of the batches of a window, taken together."""

    imbalance: ImbalanceSnapshot
    """Of assignments."""
    time_imbalance: ImbalanceSnapshot
    """Of assignments over speeds, which quota evens out; the same where ranks are equally fast."""
    floor: float
    """The lowest possible mean of time_imbalance.after. Weights move only inside a domain (a host
    or a part of one), so for a layer of a batch it is the largest domain mean of assignments (over
    speeds) over the mean of all ranks. 1.0 where all ranks are one domain."""
    replicas: ReplicaCount
    bytes_moved: int
    """Expert weights sent by the ranks of this host."""

    @classmethod
    def of(cls, rows: Rows, **others: Any) -> Self:
        """Those of ``rows``, and the ``others`` of an answer that has more."""
        count = ReplicaCount(mean=None, max=None, new=None)
        if len(rows):
            replicas, new = rows["replicas"], np.count_nonzero(rows["is_copied"]) / len(rows)
            count = ReplicaCount(mean=float(replicas.mean()), max=int(replicas.max()), new=new)
        return cls(
            imbalance=ImbalanceSnapshot.of(rows),
            time_imbalance=ImbalanceSnapshot.of(rows, "time_"),
            floor=mean_floor(rows),
            replicas=count,
            bytes_moved=int(rows["bytes_sent"].sum()),
            **others,
        )


class RankAssignments(Answer):
    """Assignments, (token, expert) pairs, of one rank."""

    before: int
    """By routing alone."""
    after: int
    """As computed."""
    mean: float
    """Of all ranks that share its layers."""
    speed: float = 1.0
    """Mean of the speeds that were planned with; 1.0 is as fast as the fastest rank."""

    @classmethod
    def of(cls, rows: Rows) -> list[Self]:
        """Of every rank of the whole group, summed over ``rows`` of a pipeline stage."""
        before = rows["load_before"].sum(axis=0, dtype=np.int64).tolist()
        after = rows["load_after"].sum(axis=0, dtype=np.int64).tolist()
        mean = sum(before) / len(before)
        speeds = [1.0] * len(before)
        if len(rows):
            speeds = np.round(rows["speed"].mean(axis=0) / FULL_SPEED, 4).tolist()
        of_ranks = zip(before, after, speeds, strict=True)
        return [cls(before=b, after=a, mean=mean, speed=s) for b, a, s in of_ranks]


def mean_floor(rows: Rows) -> float:
    """The mean of the floor of ``rows``; 1.0 where there are none."""
    return float(rows["floor"].mean()) if len(rows) else 1.0


def rank_speeds(rows: Rows) -> list[float]:
    """Speeds of all ranks in the last of ``rows``; none where there are no rows."""
    speeds: list[float] = (rows["speed"][-1:].ravel() / FULL_SPEED).round(4).tolist()
    return speeds


def spent_seconds(stage_ns: ArrayLike) -> NDArray[np.float64]:
    """Time that balancing took on the critical path, from the totals ``stage_ns`` (..., R, stages).

    Ranks without any time have no records and are ignored.
    """
    totals = np.asarray(stage_ns, dtype=np.float64)
    own = totals[..., _OWN_STAGES].sum(axis=-1).max(axis=-1, initial=0)
    waited = np.where(totals.any(axis=-1), totals[..., Stage.EXCHANGE], np.inf)
    least = waited.min(axis=-1, initial=np.inf)
    spent: NDArray[np.float64] = (own + np.where(np.isinf(least), 0, least)) / 1e9
    return spent


def seconds_by_stage(stage_ns: NDArray[np.floating]) -> dict[str, float]:
    """Seconds by name of stage, from ``stage_ns`` (stages,)."""
    return {stage.name.lower(): float(stage_ns[stage] / 1e9) for stage in Stage}


class DecisionNames(NamedTuple):
    """What happened to a batch or to one MoE layer of it, in the words of the interface."""

    phase: str  # prefill; decode: batches below min_batch_tokens, whose loads are not counted
    decision: str  # planned, forced (policy ideal) or identity (every token to its master)
    reason: str


_DONE = {Decision.PLANNED: ("planned", "imbalanced"), Decision.FORCED: ("forced", "measuring")}


def decision_names(decision: Decision) -> DecisionNames:
    """The names that ``decision`` stands for."""
    phase = "decode" if decision is Decision.SMALL else "prefill"
    return DecisionNames(phase, *_DONE.get(decision, ("identity", decision.name.lower())))
