"""The balance over a window: in total, for one layer, by layer and rank, by policy.

Computed from the primary rank's records and each rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.sidecar.statistics.figures import (
    avoided_seconds,
    imbalance_snapshot,
    imbalances,
    mean_floor,
    rank_assignments,
    replica_count,
    savings,
    spent_seconds,
    spread,
    time_imbalance_snapshot,
)
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
    Savings,
    Spread,
)
from ultraep_serve.sidecar.statistics.window import Window, outcome
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, Policy, Stage

__all__ = [
    "Heatmap",
    "LayerDetail",
    "PolicyComparison",
    "PolicyFigures",
    "batches_count",
    "bytes_by_layer",
    "compare_policies",
    "heatmap",
    "layer_detail",
    "phases",
    "summarise",
    "window_savings",
]


def summarise(
    primary: RecordArray,
    header: RingHeader,
    ranks: Sequence[RankView],
    batches: Mapping[Decision, int],
    window: Window,
) -> BalanceSnapshot:
    """The snapshot over ``window``.

    ``primary`` are the primary rank's full records and ``header`` is its header; ``ranks`` has one
    view per rank of this host; ``batches`` counts the batches of the window by decision.
    """
    considered = window.considered(primary)
    own = [window.considered(view.records) for view in ranks]
    moved = bytes_by_layer(own)
    before, after = imbalances(considered["load_before"]), imbalances(considered["load_after"])
    imbalance = ImbalanceSnapshot(spread(before), spread(after))
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
        floor=mean_floor(considered, header.location.domain_size),
        replicas=replica_count(considered["replicas"]),
        bytes_moved=sum(moved.values()),
        savings=window_savings(considered, [window.recorded(view.records) for view in ranks]),
        layers=_layers(considered, before, after, moved, header.location.domain_size),
        ranks=[
            _rank_snapshot(view, records, of_rank)
            for view, records, of_rank in zip(ranks, own, assignments, strict=True)
        ],
    )


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


def window_savings(considered: RecordArray, own: Sequence[RecordArray]) -> Savings:
    """Savings from the primary rank's ``considered`` records and all of each rank's ``own``."""
    totals = [records["stage_ns"].sum(axis=0, dtype=np.uint64) for records in own]
    return savings(avoided_seconds(considered), float(spent_seconds(totals)))


def bytes_by_layer(ranks: Sequence[RecordArray]) -> dict[int, int]:
    """Bytes that ``ranks`` sent, by layer, from each rank's own records."""
    moved: dict[int, int] = {}
    for own in ranks:
        layers, inverse = np.unique(own["layer"], return_inverse=True)
        sent = np.bincount(inverse, own["bytes_sent"])  # float64 is exact up to 8 PiB
        for layer, count in zip(layers.tolist(), sent.tolist(), strict=True):
            moved[layer] = moved.get(layer, 0) + int(count)
    return moved


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
        counts[outcome(decision).phase] += count
    return {
        "prefill": PhaseSnapshot(counts["prefill"], imbalance),
        "decode": PhaseSnapshot(counts["decode"], None),
    }


def _layers(
    considered: RecordArray,
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    moved: Mapping[int, int],
    domain_size: int,
) -> list[LayerSnapshot]:
    order = np.argsort(considered["layer"], kind="stable")
    layers, starts = np.unique(considered["layer"][order], return_index=True)
    return [
        LayerSnapshot(
            layer=layer,
            records=len(rows),
            imbalance=ImbalanceSnapshot(spread(before[rows]), spread(after[rows])),
            time_imbalance=time_imbalance_snapshot(considered[rows]),
            floor=mean_floor(considered[rows], domain_size),
            replicas=replica_count(considered["replicas"][rows]),
            bytes_moved=moved.get(layer, 0),
        )
        for layer, rows in zip(layers.tolist(), np.split(order, starts[1:]), strict=False)
    ]


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
    if by_stage.size and (by_stage > 0).all():  # one pass over all stages
        rows = [
            by_stage.mean(axis=1),
            *np.percentile(by_stage, (50, 99), axis=1),
            by_stage.max(axis=1),
        ]
        spreads = [Spread(*figures) for figures in np.array(rows).T.tolist()]
    else:
        spreads = [spread(times[times > 0]) for times in by_stage]
    return {stage.name.lower(): spreads[stage] for stage in Stage}


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
    layer: int, primary: RecordArray, ranks: Sequence[RecordArray], domain_size: int
) -> LayerDetail | None:
    """Layer ``layer`` from the primary rank's and each rank's considered records; None without."""
    records = primary[primary["layer"] == layer]
    if not len(records):
        return None
    before, after = imbalances(records["load_before"]), imbalances(records["load_after"])
    (summary,) = _layers(records, before, after, bytes_by_layer(ranks), domain_size)
    return LayerDetail(
        **vars(summary),
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
    order = np.argsort(records["layer"], kind="stable")
    layers, starts = np.unique(records["layer"][order], return_index=True)
    before = _relative(records["load_before"], order, starts)
    after = _relative(records["load_after"], order, starts)
    return Heatmap(layers.tolist(), len(records), before.tolist(), after.tolist())


def _relative(
    loads: NDArray[np.integer], order: NDArray[np.intp], starts: NDArray[np.intp]
) -> NDArray[np.float64]:
    if not len(starts):
        return np.empty((0, loads.shape[1]))
    totals = np.add.reduceat(loads[order], starts, axis=0, dtype=np.int64)
    mean = totals.mean(axis=1, keepdims=True)
    relative: NDArray[np.float64] = np.round(totals / np.where(mean > 0, mean, 1), 4)
    return relative


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
    window: Window, primary: RecordArray, ranks: Sequence[RecordArray]
) -> PolicyComparison:
    """Every policy in the primary rank's and each rank's own records of ``window``."""
    found = []
    for policy in Policy:
        mine = Window(window.since_ns, policy)
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
        savings=window_savings(considered, own),
    )
