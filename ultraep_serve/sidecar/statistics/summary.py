"""The balance over a window: in total, for one layer, by layer and rank.

Computed from the primary rank's records and each rank's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

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
)
from ultraep_serve.sidecar.statistics.held import Held, NotHeldError, RankView
from ultraep_serve.sidecar.statistics.proof import self_check_of, verification_of
from ultraep_serve.sidecar.statistics.selection import RecordSelection, decision_names
from ultraep_serve.sidecar.statistics.snapshot import (
    BalanceSnapshot,
    BatchesCount,
    Document,
    ImbalanceSnapshot,
    LayerSnapshot,
    PhaseSnapshot,
    RankAssignments,
    RankSnapshot,
    RankState,
    ReplicaCount,
    Savings,
    Spread,
    WindowFigures,
)
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Stage

__all__ = [
    "Heatmap",
    "LayerDetail",
    "batches_count",
    "heatmap",
    "layer_detail",
    "phases",
    "rank_assignments",
    "summarise",
    "sums_by",
]

_LAYER_FIELDS = ["layer", "replicas", "floor", *IMBALANCES]  # without loads, which are large


def summarise(held: Held, selection: RecordSelection) -> BalanceSnapshot:
    """The balance over ``selection``.

    If everything is selected, batches are counted since the engine started, else over the records
    still held.
    """
    considered = selection.considered(held.primary)
    own = [selection.considered(view.records) for view in held.views]
    moved = sums_by("layer", "bytes_sent", own)
    figures = _figures(considered, sum(moved.values()))
    batches, header = held.batches(selection), held.header
    assignments = _assignments_of(held.views, considered)
    return BalanceSnapshot(
        **vars(figures),
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        host_ranks=[view.health.rank for view in held.views],
        window_records=len(considered),
        assignments=int(considered["load_before"].sum(dtype=np.int64)),
        batches=batches_count(batches),
        phases=phases(batches, figures.imbalance),
        savings=_savings(considered, [selection.recorded(view.records) for view in held.views]),
        costs=asdict(held.costs) if held.costs else None,
        self_check=self_check_of(held.headers),
        verification=verification_of(held.headers, is_off=bool(held.switched_off)),
        layers=[
            _layer(layer, records, moved.get(layer, 0))
            for layer, records in parts_by(repack_fields(considered[_LAYER_FIELDS]), "layer")
        ],
        ranks=[
            _rank_snapshot(view, records, of_rank)
            for view, records, of_rank in zip(held.views, own, assignments, strict=True)
        ],
    )


def _figures(records: RecordArray, moved: int) -> WindowFigures:
    """Of the primary rank's ``records``; ranks sent ``moved`` bytes."""
    replicas = records["replicas"]
    mean, most = (float(replicas.mean()), int(replicas.max())) if len(records) else (None, None)
    return WindowFigures(
        imbalance=imbalance_snapshot(records),
        time_imbalance=imbalance_snapshot(records, "time_"),
        floor=mean_floor(records),
        replicas=ReplicaCount(mean=mean, max=most),
        bytes_moved=moved,
    )


def _layer(layer: int, records: RecordArray, moved: int) -> LayerSnapshot:
    return LayerSnapshot(**vars(_figures(records, moved)), layer=layer, records=len(records))


def rank_assignments(records: RecordArray) -> list[RankAssignments]:
    """Assignments of every rank of the whole group, summed over the primary rank's ``records``."""
    before = records["load_before"].sum(axis=0, dtype=np.int64).tolist()
    after = records["load_after"].sum(axis=0, dtype=np.int64).tolist()
    mean = sum(before) / len(before)
    speeds = [1.0] * len(before)
    if len(records):
        speeds = np.round(records["speed"].mean(axis=0) / FULL_SPEED, 4).tolist()
    of_ranks = zip(before, after, speeds, strict=True)
    return [RankAssignments(before=b, after=a, mean=mean, speed=s) for b, a, s in of_ranks]


def _assignments_of(ranks: Sequence[RankView], considered: RecordArray) -> list[RankAssignments]:
    """Of each of ``ranks``, in the layers of its pipeline stage, which are those it recorded."""
    size = considered["load_before"].shape[1]
    numbers = [view.health.rank for view in ranks]
    if len({number // size for number in numbers}) == 1:
        everywhere = rank_assignments(considered)
        return [everywhere[number % size] for number in numbers]
    found = []
    for number, view in zip(numbers, ranks, strict=True):
        own = np.isin(considered["layer"], np.unique(view.records["layer"]))
        found.append(rank_assignments(considered[own])[number % size])
    return found


def _savings(considered: RecordArray, own: Sequence[RecordArray]) -> Savings:
    """Savings from the primary rank's ``considered`` records and all of each rank's ``own``."""
    totals = [records["stage_ns"].sum(axis=0, dtype=np.uint64) for records in own]
    avoided = considered["avoided"]
    return savings(float(avoided[avoided > 0].sum()), -float(avoided[avoided < 0].sum()), totals)


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
    return BatchesCount(planned=batches.get(Decision.PLANNED, 0), skipped=skipped)


def phases(
    batches: Mapping[Decision, int], imbalance: ImbalanceSnapshot
) -> dict[str, PhaseSnapshot]:
    """Batches by phase, from those by decision; ``imbalance`` is that of prefill."""
    counts = {"prefill": 0, "decode": 0}
    for decision, count in batches.items():
        counts[decision_names(decision).phase] += count
    return {
        "prefill": PhaseSnapshot(batches=counts["prefill"], imbalance=imbalance),
        "decode": PhaseSnapshot(batches=counts["decode"], imbalance=None),
    }


def _rank_snapshot(
    view: RankView, records: RecordArray, assignments: RankAssignments
) -> RankSnapshot:
    return RankSnapshot(
        **{name: getattr(view.health, name) for name in RankState.model_fields},
        assignments=assignments,
        bytes_sent=int(records["bytes_sent"].sum()),
        bytes_received=int(records["bytes_received"].sum()),
        stage_seconds=_stage_spreads(records["stage_ns"]),
        records=len(records),
    )


def _stage_spreads(stage_ns: NDArray[np.unsignedinteger]) -> dict[str, Spread]:
    """Spread of the seconds in each stage, ``stage_ns`` (n, stages), where it ran at all."""
    by_stage = np.ascontiguousarray(stage_ns.T) / 1e9
    return {stage.name.lower(): spread(by_stage[stage][by_stage[stage] > 0]) for stage in Stage}


class LayerDetail(Document, LayerSnapshot):
    """One MoE layer, the assignments of each rank, and the replicas in its last batch."""

    ranks: list[RankAssignments]
    """By rank, over the window."""
    last_batch: int
    last_slot_expert: list[list[int]]
    """(ranks, slots): logical expert in each replica slot in the last batch, -1 empty."""


def layer_detail(held: Held, layer: int, selection: RecordSelection) -> LayerDetail:
    """Layer ``layer`` over ``selection``. Raises NotHeldError."""
    considered = selection.considered(held.primary)
    records = considered[considered["layer"] == layer]
    if not len(records):
        raise NotHeldError(f"no records of layer {layer} in this window")
    own = [selection.considered(records) for records in held.own]
    return LayerDetail(
        **vars(_layer(layer, records, sums_by("layer", "bytes_sent", own).get(layer, 0))),
        ranks=rank_assignments(records),
        last_batch=int(records["batch"][-1]),
        last_slot_expert=records["slot_expert"][-1].tolist(),
    )


class Heatmap(Document):
    """Load of each rank in each MoE layer, over the window."""

    layers: list[int]
    """The layer of each row."""
    records: int
    """Records that it was computed from."""
    before: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, by routing alone."""
    after: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, as computed."""


def heatmap(held: Held, selection: RecordSelection) -> Heatmap:
    """The heat map over ``selection``."""
    records = selection.considered(held.primary)
    layers, inverse = np.unique(records["layer"], return_inverse=True)
    relative = {}
    for when in ("before", "after"):
        loads = records[f"load_{when}"]
        totals = np.stack([np.bincount(inverse, rank, len(layers)) for rank in loads.T], axis=1)
        mean = totals.mean(axis=1, keepdims=True)
        relative[when] = np.round(totals / np.where(mean > 0, mean, 1), 4).tolist()
    return Heatmap(layers=layers.tolist(), records=len(records), **relative)
