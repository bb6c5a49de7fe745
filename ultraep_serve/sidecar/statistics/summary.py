"""The balance over a window: in total, for one layer, by layer and rank, by policy.

Computed from the primary rank's records and each rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.recfunctions import repack_fields
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.sidecar.statistics.fold import (
    IMBALANCES,
    imbalance_snapshot,
    mean_floor,
    parts_by,
    savings,
    spread,
    time_imbalance_snapshot,
)
from ultraep_serve.sidecar.statistics.selection import RecordSelection, decision_names
from ultraep_serve.sidecar.statistics.snapshot import (
    SCHEMA_VERSION,
    BalanceSnapshot,
    BatchesCount,
    Documented,
    ImbalanceSnapshot,
    LayerSnapshot,
    PhaseSnapshot,
    RankAssignments,
    RankSnapshot,
    RankView,
    ReplicaCount,
    Savings,
    Spread,
)
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, Policy, Stage

__all__ = [
    "Heatmap",
    "LayerDetail",
    "PolicyComparison",
    "PolicyFigures",
    "batches_count",
    "compare_policies",
    "heatmap",
    "layer_detail",
    "phases",
    "rank_assignments",
    "summarise",
    "sums_by",
]

_LAYER_FIELDS = ["layer", "replicas", "floor", *IMBALANCES]  # without loads, which are large


def summarise(
    primary: RecordArray,
    header: RingHeader,
    ranks: Sequence[RankView],
    batches: Mapping[Decision, int],
    selection: RecordSelection,
) -> BalanceSnapshot:
    """The snapshot over ``selection``.

    ``primary`` are the primary rank's records with figures and ``header`` is its header; ``ranks``
    has one view per rank of this host; ``batches`` counts the batches selected by decision.
    """
    considered = selection.considered(primary)
    own = [selection.considered(view.records) for view in ranks]
    moved = sums_by("layer", "bytes_sent", own)
    imbalance = imbalance_snapshot(considered)
    assignments = _assignments_of(ranks, considered)
    return BalanceSnapshot(
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        host_ranks=[view.rank for view in ranks],
        window_records=len(considered),
        assignments=int(considered["load_before"].sum(dtype=np.int64)),
        batches=batches_count(batches),
        phases=phases(batches, imbalance),
        imbalance=imbalance,
        time_imbalance=time_imbalance_snapshot(considered),
        floor=mean_floor(considered),
        replicas=_replica_count(considered),
        bytes_moved=sum(moved.values()),
        savings=_savings(considered, [selection.recorded(view.records) for view in ranks]),
        layers=[
            _layer(layer, records, moved.get(layer, 0))
            for layer, records in parts_by(repack_fields(considered[_LAYER_FIELDS]), "layer")
        ],
        ranks=[
            _rank_snapshot(view, records, of_rank)
            for view, records, of_rank in zip(ranks, own, assignments, strict=True)
        ],
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


def _assignments_of(ranks: Sequence[RankView], considered: RecordArray) -> list[RankAssignments]:
    """Of each of ``ranks``, in the layers of its pipeline stage, which are those it recorded."""
    size = considered["load_before"].shape[1]
    if len({view.rank // size for view in ranks}) == 1:
        everywhere = rank_assignments(considered)
        return [everywhere[view.rank % size] for view in ranks]
    found = []
    for view in ranks:
        own = np.isin(considered["layer"], np.unique(view.records["layer"]))
        found.append(rank_assignments(considered[own])[view.rank % size])
    return found


def _savings(considered: RecordArray, own: Sequence[RecordArray]) -> Savings:
    """Savings from the primary rank's ``considered`` records and all of each rank's ``own``."""
    totals = [records["stage_ns"].sum(axis=0, dtype=np.uint64) for records in own]
    return savings(considered["avoided"], totals)


def sums_by(key: str, field: str, ranks: Sequence[RecordArray]) -> dict[int, int]:
    """The sum of ``field`` for every value of ``key``, over all ``ranks``' own records."""
    sums: dict[int, int] = {}
    for own in ranks:
        values, inverse = np.unique(own[key], return_inverse=True)
        found = np.bincount(inverse, own[field])  # float64 is exact up to 8 PiB
        for value, total in zip(values.tolist(), found.tolist(), strict=True):
            sums[value] = sums.get(value, 0) + int(total)
    return sums


def batches_count(batches: Mapping[Decision, int]) -> BatchesCount:
    """``batches`` by decision, in the form of the interface."""
    skipped = {d.name.lower(): batches.get(d, 0) for d in Decision if d != Decision.PLANNED}
    return BatchesCount(batches.get(Decision.PLANNED, 0), skipped)


def phases(
    batches: Mapping[Decision, int], imbalance: ImbalanceSnapshot
) -> dict[str, PhaseSnapshot]:
    """Batches by phase, from those by decision; ``imbalance`` is that of prefill."""
    counts = {"prefill": 0, "decode": 0}
    for decision, count in batches.items():
        counts[decision_names(decision).phase] += count
    return {
        "prefill": PhaseSnapshot(counts["prefill"], imbalance),
        "decode": PhaseSnapshot(counts["decode"], None),
    }


def _layer(layer: int, records: RecordArray, moved: int) -> LayerSnapshot:
    return LayerSnapshot(
        layer=layer,
        records=len(records),
        imbalance=imbalance_snapshot(records),
        time_imbalance=time_imbalance_snapshot(records),
        floor=mean_floor(records),
        replicas=_replica_count(records),
        bytes_moved=moved,
    )


def _replica_count(records: RecordArray) -> ReplicaCount:
    replicas = records["replicas"]
    if not len(replicas):
        return ReplicaCount(None, None)
    return ReplicaCount(float(replicas.mean()), int(replicas.max()))


def _rank_snapshot(
    view: RankView, records: RecordArray, assignments: RankAssignments
) -> RankSnapshot:
    header = view.header
    return RankSnapshot(
        rank=view.rank,
        pid=header.pid if header else None,
        state=header.state.name.lower() if header else "missing",
        alive=view.alive,
        heartbeat_age_seconds=view.heartbeat_age_seconds,
        last_batch_age_seconds=view.last_batch_age_seconds,
        assignments=assignments,
        bytes_sent=int(records["bytes_sent"].sum()),
        bytes_received=int(records["bytes_received"].sum()),
        stage_seconds=_stage_spreads(records["stage_ns"]),
        records=len(records),
        lost=header.lost if header else 0,
    )


def _stage_spreads(stage_ns: NDArray[np.unsignedinteger]) -> dict[str, Spread]:
    """Spread of the seconds in each stage, ``stage_ns`` (n, stages), where it ran at all."""
    by_stage = np.ascontiguousarray(stage_ns.T) / 1e9
    return {stage.name.lower(): spread(by_stage[stage][by_stage[stage] > 0]) for stage in Stage}


@dataclass(frozen=True)
class LayerDetail(LayerSnapshot):
    """One MoE layer, the assignments of each rank, and the replicas in its last batch."""

    ranks: list[RankAssignments]
    """By rank, over the window."""
    last_batch: int
    last_slot_expert: list[list[int]]
    """(ranks, slots): logical expert in each replica slot in the last batch, -1 empty."""
    schema_version: int = SCHEMA_VERSION


def layer_detail(
    layer: int, primary: RecordArray, ranks: Sequence[RecordArray]
) -> LayerDetail | None:
    """Layer ``layer`` from the primary rank's and each rank's considered records; None without."""
    records = primary[primary["layer"] == layer]
    if not len(records):
        return None
    moved = sum(int(own["bytes_sent"][own["layer"] == layer].sum()) for own in ranks)
    return LayerDetail(
        **vars(_layer(layer, records, moved)),
        ranks=rank_assignments(records),
        last_batch=int(records["batch"][-1]),
        last_slot_expert=records["slot_expert"][-1].tolist(),
    )


@dataclass(frozen=True)
class Heatmap(Documented):
    """Load of each rank in each MoE layer, over the window."""

    layers: list[int]
    """The layer of each row."""
    records: int
    """Records that it was computed from."""
    before: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, by routing alone."""
    after: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, as computed."""
    schema_version: int = SCHEMA_VERSION


def heatmap(records: RecordArray) -> Heatmap:
    """From the primary rank's ``records`` that the policy considered."""
    layers, inverse = np.unique(records["layer"], return_inverse=True)
    relative = []
    for loads in (records["load_before"], records["load_after"]):
        totals = np.stack([np.bincount(inverse, rank, len(layers)) for rank in loads.T], axis=1)
        mean = totals.mean(axis=1, keepdims=True)
        relative.append(np.round(totals / np.where(mean > 0, mean, 1), 4).tolist())
    return Heatmap(layers.tolist(), len(records), *relative)


@dataclass(frozen=True)
class PolicyFigures(Documented):
    """The batches that one policy served."""

    policy: str
    batches: int
    layers: int
    """MoE layers of those batches whose loads the policy considered."""
    imbalance: ImbalanceSnapshot
    """before: as policy off would have computed the same batches."""
    compute_microseconds_per_token: float | None
    """Time of the engine's part of a MoE layer per token of its batch, on the primary rank."""
    savings: Savings


@dataclass(frozen=True)
class PolicyComparison(Documented):
    """The policies that served batches in the window, except off, which writes no records."""

    policies: list[PolicyFigures]
    schema_version: int = SCHEMA_VERSION


def compare_policies(
    selection: RecordSelection, primary: RecordArray, ranks: Sequence[RecordArray]
) -> PolicyComparison:
    """Every policy in the primary rank's and each rank's own records of ``selection``."""
    found = []
    for policy in Policy:
        mine = RecordSelection(selection.since_ns, policy)
        considered = mine.considered(primary)
        if len(considered):
            found.append(_figures(policy, considered, [mine.recorded(own) for own in ranks]))
    return PolicyComparison(found)


def _figures(policy: Policy, considered: RecordArray, own: list[RecordArray]) -> PolicyFigures:
    tokens = int(considered["tokens"].sum(dtype=np.int64))
    compute = float(considered["stage_ns"][:, Stage.COMPUTE].sum()) / 1e3
    return PolicyFigures(
        policy=policy.value,
        batches=len(np.unique(considered["batch"])),
        layers=len(considered),
        imbalance=imbalance_snapshot(considered),
        compute_microseconds_per_token=compute / tokens if tokens else None,
        savings=_savings(considered, own),
    )
