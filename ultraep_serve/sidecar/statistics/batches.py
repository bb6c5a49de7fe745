"""Batches, assembled from the records of their layers, as a list or in detail."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.sidecar.statistics.fold import (
    batch_decisions,
    imbalance_snapshot,
    parts_by,
    time_imbalance_snapshot,
)
from ultraep_serve.sidecar.statistics.selection import decision_names
from ultraep_serve.sidecar.statistics.snapshot import (
    SCHEMA_VERSION,
    Documented,
    ImbalanceSnapshot,
    RankAssignments,
)
from ultraep_serve.sidecar.statistics.summary import rank_assignments, sums_by
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage

__all__ = [
    "BatchDetail",
    "BatchLayer",
    "BatchLayerDetail",
    "BatchList",
    "BatchSnapshot",
    "Replica",
    "batch_detail",
    "batch_layer_detail",
    "batch_snapshot",
    "batch_snapshots",
    "count_batches",
]


@dataclass(frozen=True)
class BatchSnapshot(Documented):
    """One batch: its layers taken together."""

    batch: int
    """Number of the forward pass since the engine started, the same on every rank."""
    time_ns: int
    """Unix time of its last layer."""
    policy: str
    """Policy in force."""
    tokens: int
    """Tokens, over all ranks."""
    layers: dict[str, int]
    """Its MoE layers by decision."""
    imbalance: ImbalanceSnapshot
    """Over its layers."""
    time_imbalance: ImbalanceSnapshot
    """Of assignments over speeds; the same where ranks are equally fast."""
    replicas: int
    """Replicas placed, over all layers and ranks."""
    bytes_moved: int
    """Expert weights sent by all ranks."""
    avoided_seconds: float
    """Estimated time that balancing took off its layers; negative where they took longer."""


@dataclass(frozen=True)
class BatchList(Documented):
    """Batches, newest first."""

    batches: list[BatchSnapshot]
    next_before: int | None = None
    """Value of the parameter ``before`` for the next page; null on the last page."""
    schema_version: int = SCHEMA_VERSION


def count_batches(records: RecordArray) -> dict[Decision, int]:
    """Batches of the primary rank's ``records`` by decision: planned if any layer was."""
    codes, counts = np.unique(batch_decisions(records).decisions, return_counts=True)
    return dict(zip(map(Decision, codes.tolist()), counts.tolist(), strict=True))


def batch_snapshots(
    primary: RecordArray, ranks: Sequence[RecordArray], limit: int, before: int | None = None
) -> BatchList:
    """The newest ``limit`` batches in the ``primary`` rank's records, numbered below ``before``.

    ``ranks`` are each rank's own records.
    """
    batches = np.unique(primary["batch"])[::-1]
    if before is not None:
        batches = batches[batches < np.uint64(before)]
    more, batches = len(batches) > limit, batches[:limit]
    if not len(batches):
        return BatchList([])
    oldest, newest = batches[-1], batches[0]
    primary, *ranks = (
        records[(records["batch"] >= oldest) & (records["batch"] <= newest)]
        for records in (primary, *ranks)
    )
    moved = sums_by("batch", "bytes_sent", ranks)
    found = [batch_snapshot(part, moved.get(n, 0)) for n, part in parts_by(primary, "batch")]
    return BatchList(found[::-1], next_before=int(oldest) if more else None)


def batch_snapshot(records: RecordArray, moved: int) -> BatchSnapshot:
    """The batch of the primary rank's ``records``; all ranks together sent ``moved`` bytes."""
    codes, counts = np.unique(records["decision"], return_counts=True)
    last = records[-1]
    return BatchSnapshot(
        batch=int(last["batch"]),
        time_ns=int(last["time_ns"]),
        policy=list(Policy)[last["policy"]].value,
        tokens=int(last["tokens"]),
        layers={
            Decision(code).name.lower(): count
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
        },
        imbalance=imbalance_snapshot(records),
        time_imbalance=time_imbalance_snapshot(records),
        replicas=int(records["replicas"].sum(dtype=np.int64)),
        bytes_moved=moved,
        avoided_seconds=float(records["avoided"].sum()),
    )


@dataclass(frozen=True)
class BatchLayer(Documented):
    """One MoE layer of one batch."""

    layer: int
    decision: str
    """planned, forced, or identity: every token went to its expert's home rank."""
    reason: str
    """imbalanced, measuring, policy_off, balanced, inconsistent or unprofitable."""
    imbalance_before: float
    """Max/mean of assignments over ranks, by routing alone."""
    imbalance_after: float
    """Max/mean of assignments over ranks, as computed."""
    time_imbalance_before: float
    """Of assignments over the speeds of ranks, by routing alone."""
    time_imbalance_after: float
    """Of assignments over the speeds of ranks, as computed."""
    replicas: int
    """Replicas placed, over all ranks."""
    bytes_moved: int
    """Expert weights sent by all ranks."""
    avoided_seconds: float
    """Estimated time that balancing took off; negative: the layer took longer."""
    stage_seconds: dict[str, float]
    """Time in each stage, on its slowest rank."""


@dataclass(frozen=True)
class BatchDetail(Documented):
    """One batch and its layers."""

    summary: BatchSnapshot
    layers: list[BatchLayer]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Replica(Documented):
    """A copy of an expert in another rank's slot."""

    expert: int
    """Logical expert."""
    home_rank: int
    """Rank of its master."""
    rank: int
    """Rank that holds the copy."""
    slot: int
    """Slot of that rank."""
    assignments: int
    """Assignments that the copy computes instead of the master (its quota)."""
    bytes: int
    """Weights copied into the slot."""


@dataclass(frozen=True)
class BatchLayerDetail(Documented):
    """One MoE layer of one batch, with its plan."""

    batch: int
    time_ns: int
    """Unix time at its end."""
    policy: str
    tokens: int
    """Tokens of the batch, over all ranks."""
    summary: BatchLayer
    ranks: list[RankAssignments]
    """Assignments by rank."""
    expert_assignments: list[int]
    """Assignments by logical expert; expert e lives on rank e // (experts / ranks)."""
    replicas: list[Replica]
    stage_seconds: list[dict[str, float]]
    """Time in each stage, by rank; empty for a rank without this record."""
    schema_version: int = SCHEMA_VERSION


def batch_detail(
    batch: int, primary: RecordArray, ranks: Sequence[RecordArray]
) -> BatchDetail | None:
    """Batch ``batch`` from the primary rank's and each rank's own records; None if not held."""
    records, own = _of_batch(batch, primary, ranks)
    if not len(records):
        return None
    layers = [_batch_layer(records[i : i + 1], own) for i in range(len(records))]
    moved = sum(layer.bytes_moved for layer in layers)
    return BatchDetail(batch_snapshot(records, moved), layers)


def batch_layer_detail(
    batch: int, layer: int, shape: ExpertShape, primary: RecordArray, ranks: Sequence[RecordArray]
) -> BatchLayerDetail | None:
    """Layer ``layer`` of batch ``batch``, with its plan; None if not held."""
    records, own = _of_batch(batch, primary, ranks)
    records = records[records["layer"] == layer]
    if not len(records):
        return None
    record, summary = records[0], batch_snapshot(records, 0)
    return BatchLayerDetail(
        batch=batch,
        time_ns=summary.time_ns,
        policy=summary.policy,
        tokens=summary.tokens,
        summary=_batch_layer(records[:1], own),
        ranks=rank_assignments(records[:1]),
        expert_assignments=record["expert_load"].tolist(),
        replicas=_replicas(record, shape, [_received(records, layer) for records in own]),
        stage_seconds=[_stage_seconds(records[records["layer"] == layer]) for records in own],
    )


def _of_batch(
    batch: int, primary: RecordArray, ranks: Sequence[RecordArray]
) -> tuple[RecordArray, list[RecordArray]]:
    number = np.uint64(batch)
    return primary[primary["batch"] == number], [own[own["batch"] == number] for own in ranks]


def _batch_layer(record: RecordArray, own: Sequence[RecordArray]) -> BatchLayer:
    """From the primary rank's ``record`` (1,) and each rank's own records of the batch."""
    layer = int(record["layer"][0])
    mine = np.concatenate([records[records["layer"] == layer] for records in own])
    _, decision, reason = decision_names(Decision(int(record["decision"][0])))
    slowest = mine["stage_ns"].max(axis=0, initial=0) / 1e9
    return BatchLayer(
        layer=layer,
        decision=decision,
        reason=reason,
        imbalance_before=float(record["before"][0]),
        imbalance_after=float(record["after"][0]),
        time_imbalance_before=float(record["time_before"][0]),
        time_imbalance_after=float(record["time_after"][0]),
        replicas=int(record["replicas"][0]),
        bytes_moved=int(mine["bytes_sent"].sum()),
        avoided_seconds=float(record["avoided"][0]),
        stage_seconds={stage.name.lower(): float(slowest[stage]) for stage in Stage},
    )


def _replicas(record: np.void, shape: ExpertShape, received: list[int]) -> list[Replica]:
    experts, loads = record["slot_expert"], record["slot_load"]
    filled = (experts >= 0).sum(axis=1)
    masters = max(1, shape.num_masters)
    return [
        Replica(
            expert=int(experts[rank, slot]),
            home_rank=int(experts[rank, slot]) // masters,
            rank=rank,
            slot=slot,
            assignments=int(loads[rank, slot]),
            bytes=received[rank] // int(filled[rank]),
        )
        for rank, slot in np.argwhere(experts >= 0).tolist()
    ]


def _received(records: RecordArray, layer: int) -> int:
    return int(records["bytes_received"][records["layer"] == layer].sum())


def _stage_seconds(records: RecordArray) -> dict[str, float]:
    if not len(records):
        return {}
    return {stage.name.lower(): float(records["stage_ns"][0, stage] / 1e9) for stage in Stage}
