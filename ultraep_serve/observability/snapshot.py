"""Figures from records: how uneven the ranks were, what it took to even them out.

Imbalance is max/mean of assignments over ranks, per layer and batch. All ranks hold the same loads,
so it is computed from one rank's records (the lead); bytes and times come from each rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray, RingHeader
from ultraep_serve.types import Decision, Policy, Verb

__all__ = [
    "BalanceSnapshot",
    "BatchesCount",
    "ImbalanceSnapshot",
    "LayerSnapshot",
    "RankAssignments",
    "RankSnapshot",
    "RankView",
    "ReplicaCount",
    "Spread",
    "Window",
    "bytes_by_layer",
    "imbalance_snapshot",
    "imbalances",
    "layer_snapshot",
    "spread",
    "summarise",
]

# Layers whose loads were weighed by the policy; the others never reached the planner.
_WEIGHED: dict[Policy, tuple[Decision, ...]] = {
    Policy.QUOTA: (Decision.PLANNED, Decision.BALANCED, Decision.UNPROFITABLE),
    Policy.EPLB: (Decision.PLANNED, Decision.UNPROFITABLE),
    Policy.OFF: (Decision.POLICY_OFF,),
    Policy.IDEAL: (Decision.FORCED,),
}
_BALANCING = (Policy.QUOTA, Policy.EPLB)


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and maximum of some values; all None where there were none."""

    mean: float | None
    p50: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True)
class ImbalanceSnapshot:
    """Max/mean over ranks, before and after balancing; 1.0 is perfect."""

    before: Spread
    after: Spread


@dataclass(frozen=True)
class ReplicaCount:
    """Replicas placed per layer and batch, over all ranks."""

    mean: float | None
    max: int | None


@dataclass(frozen=True)
class BatchesCount:
    """Batches by decision; ``skipped`` says why the others kept the identity mapping."""

    planned: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class LayerSnapshot:
    """One MoE layer over the window."""

    layer: int
    records: int
    imbalance: ImbalanceSnapshot
    replicas: ReplicaCount
    bytes_moved: int  # sent by all ranks


@dataclass(frozen=True)
class RankAssignments:
    """Assignments over the window: by routing alone, and as computed."""

    before: int
    after: int


@dataclass(frozen=True)
class RankSnapshot:
    """One rank over the window. ``state`` is "missing" where it has no readable ring."""

    rank: int
    pid: int | None
    state: str
    alive: bool
    heartbeat_age_seconds: float | None
    assignments: RankAssignments
    bytes_sent: int
    bytes_received: int
    verb_seconds: dict[str, Spread]  # by verb, over the layers in which it ran
    records: int
    lost: int


@dataclass(frozen=True)
class BalanceSnapshot:
    """Everything at a glance, over the records in the window."""

    engine: str
    mode: str
    policy: str  # now in force
    num_ranks: int
    window_records: int  # the lead rank's, after filtering
    batches: BatchesCount
    imbalance: ImbalanceSnapshot
    replicas: ReplicaCount
    bytes_moved: int  # sent by all ranks
    layers: list[LayerSnapshot]
    ranks: list[RankSnapshot]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RankView:
    """What is known of one rank."""

    rank: int
    header: RingHeader | None  # None: no readable ring
    alive: bool
    heartbeat_age_seconds: float | None
    records: RecordArray  # (n,) its own, at least the fields that RankSnapshot needs
    last_batch_age_seconds: float | None = None  # None: no batch yet


@dataclass(frozen=True)
class Window:
    """Which records count: a time and a policy."""

    since_ns: int = 0  # wall clock, inclusive
    policy: Policy | None = None  # None: any; for imbalance any that gives right answers

    def recorded(self, records: RecordArray) -> RecordArray:
        """Records of this window, whatever was decided."""
        keep = records["time_ns"] >= np.uint64(self.since_ns)
        if self.policy is not None:
            keep &= records["policy"] == self.policy.code
        return records[keep]

    def weighed(self, records: RecordArray) -> RecordArray:
        """Records of this window whose loads the policy weighed: those with an imbalance."""
        records = self.recorded(records)
        keep = np.zeros(len(records), dtype=bool)
        for policy in (self.policy,) if self.policy else _BALANCING:
            decided = np.isin(records["decision"], [int(d) for d in _WEIGHED[policy]])
            keep |= decided & (records["policy"] == policy.code)
        weighed: RecordArray = records[keep]
        return weighed


def imbalances(loads: NDArray[np.integer]) -> NDArray[np.float64]:
    """Max/mean over ranks of each row of ``loads`` (n, R); 1.0 for an empty row."""
    total = loads.sum(axis=1, dtype=np.int64)
    peak = loads.max(axis=1, initial=0).astype(np.float64) * loads.shape[1]
    result: NDArray[np.float64] = np.where(total > 0, peak / np.maximum(total, 1), 1.0)
    return result


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


def bytes_by_layer(ranks: Sequence[RecordArray]) -> dict[int, int]:
    """Bytes that all ranks sent, by layer, from each rank's own records."""
    moved: dict[int, int] = {}
    for own in ranks:
        layers, places = np.unique(own["layer"], return_inverse=True)
        sent = np.zeros(len(layers), np.uint64)
        np.add.at(sent, places, own["bytes_sent"])
        for layer, count in zip(layers.tolist(), sent.tolist(), strict=True):
            moved[layer] = moved.get(layer, 0) + count
    return moved


def layer_snapshot(layer: int, records: RecordArray, moved: int) -> LayerSnapshot:
    """Layer ``layer`` from the lead's weighed ``records`` of it; all ranks sent ``moved`` bytes."""
    return LayerSnapshot(
        layer=layer,
        records=len(records),
        imbalance=imbalance_snapshot(records),
        replicas=_replicas(records),
        bytes_moved=moved,
    )


def summarise(
    lead: RecordArray,
    header: RingHeader,
    ranks: Sequence[RankView],
    batches: Mapping[Decision, int],
    window: Window,
) -> BalanceSnapshot:
    """The snapshot over ``window``.

    ``lead`` holds the lead rank's full records and ``header`` its header; ``ranks`` has one view
    per rank, 0 to R-1; ``batches`` counts the batches of the window by decision.
    """
    weighed = window.weighed(lead)
    own = [window.weighed(view.records) for view in ranks]
    moved = bytes_by_layer(own)
    before = weighed["load_before"].sum(axis=0, dtype=np.int64)
    after = weighed["load_after"].sum(axis=0, dtype=np.int64)
    return BalanceSnapshot(
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        window_records=len(weighed),
        batches=BatchesCount(
            planned=batches.get(Decision.PLANNED, 0),
            skipped={d.name.lower(): batches.get(d, 0) for d in Decision if d != Decision.PLANNED},
        ),
        imbalance=imbalance_snapshot(weighed),
        replicas=_replicas(weighed),
        bytes_moved=sum(moved.values()),
        layers=[
            layer_snapshot(layer, weighed[weighed["layer"] == layer], moved.get(layer, 0))
            for layer in np.unique(weighed["layer"]).tolist()
        ],
        ranks=[
            _rank_snapshot(view, records, RankAssignments(int(before[rank]), int(after[rank])))
            for rank, (view, records) in enumerate(zip(ranks, own, strict=True))
        ],
    )


def _replicas(records: RecordArray) -> ReplicaCount:
    if not len(records):
        return ReplicaCount(None, None)
    return ReplicaCount(float(records["replicas"].mean()), int(records["replicas"].max()))


def _rank_snapshot(
    view: RankView, records: RecordArray, assignments: RankAssignments
) -> RankSnapshot:
    header = view.header
    seconds = records["verb_ns"] / 1e9
    return RankSnapshot(
        rank=view.rank,
        pid=header.pid if header else None,
        state=header.state.name.lower() if header else "missing",
        alive=view.alive,
        heartbeat_age_seconds=view.heartbeat_age_seconds,
        assignments=assignments,
        bytes_sent=int(records["bytes_sent"].sum()),
        bytes_received=int(records["bytes_received"].sum()),
        verb_seconds={
            verb.name.lower(): spread(seconds[:, verb][seconds[:, verb] > 0]) for verb in Verb
        },
        records=len(records),
        lost=header.lost if header else 0,
    )
