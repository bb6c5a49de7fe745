"""Batches, assembled from the records of their layers, as a list or in detail."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ultraep_serve.sidecar.statistics.fold import imbalance_snapshot, parts_by, stage_seconds
from ultraep_serve.sidecar.statistics.held import Held, NotHeldError
from ultraep_serve.sidecar.statistics.selection import RecordSelection, decision_names
from ultraep_serve.sidecar.statistics.snapshot import (
    Answer,
    Document,
    ImbalanceSnapshot,
    RankAssignments,
)
from ultraep_serve.sidecar.statistics.summary import rank_assignments, sums_by
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Policy

__all__ = [
    "BatchDetail",
    "BatchLayer",
    "BatchLayerDetail",
    "BatchList",
    "BatchSnapshot",
    "Replica",
    "batch_detail",
    "batch_layer_detail",
    "batch_snapshots",
    "newest_batch",
]


class _BatchHead(Answer):
    batch: int
    """Number of the forward pass since the engine started, the same on every rank."""
    time_ns: int
    """Unix time at its end."""
    policy: str
    """Policy in force."""
    tokens: int
    """Tokens of the batch, over all ranks."""


class BatchSnapshot(_BatchHead):
    """One batch: its layers taken together."""

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


class BatchList(Document):
    """Batches, newest first."""

    batches: list[BatchSnapshot]
    next_before: int | None = None
    """Value of the parameter ``before`` for the next page; null on the last page."""


def batch_snapshots(
    held: Held, limit: int, before: int | None, selection: RecordSelection
) -> BatchList:
    """The newest ``limit`` batches of ``selection``, numbered below ``before``."""
    primary = selection.recorded(held.primary)
    batches = np.unique(primary["batch"])[::-1]
    if before is not None:
        batches = batches[batches < np.uint64(before)]
    more, batches = len(batches) > limit, batches[:limit]
    if not len(batches):
        return BatchList(batches=[])
    oldest, newest = batches[-1], batches[0]
    primary, *ranks = (
        records[(records["batch"] >= oldest) & (records["batch"] <= newest)]
        for records in (primary, *map(selection.recorded, held.own))
    )
    moved = sums_by("batch", "bytes_sent", ranks)
    found = [_batch_snapshot(part, moved.get(n, 0)) for n, part in parts_by(primary, "batch")]
    return BatchList(batches=found[::-1], next_before=int(oldest) if more else None)


def newest_batch(held: Held) -> BatchSnapshot | None:
    """The newest batch; None where no records are held."""
    found = batch_snapshots(held, 1, None, RecordSelection()).batches
    return found[0] if found else None


def _head(record: np.void) -> dict[str, Any]:
    """The fields of ``_BatchHead``."""
    numbers = {name: int(record[name]) for name in ("batch", "time_ns", "tokens")}
    return {**numbers, "policy": list(Policy)[record["policy"]].value}


def _batch_snapshot(records: RecordArray, moved: int) -> BatchSnapshot:
    """The batch of the primary rank's ``records``; all ranks together sent ``moved`` bytes."""
    codes, counts = np.unique(records["decision"], return_counts=True)
    return BatchSnapshot(
        **_head(records[-1]),
        layers={
            Decision(code).name.lower(): count
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
        },
        imbalance=imbalance_snapshot(records),
        time_imbalance=imbalance_snapshot(records, "time_"),
        replicas=int(records["replicas"].sum(dtype=np.int64)),
        bytes_moved=moved,
        avoided_seconds=float(records["avoided"].sum()),
    )


class BatchLayer(Answer):
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


class BatchDetail(Document):
    """One batch and its layers."""

    summary: BatchSnapshot
    layers: list[BatchLayer]


class Replica(Answer):
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


class BatchLayerDetail(Document, _BatchHead):
    """One MoE layer of one batch, with its plan."""

    summary: BatchLayer
    ranks: list[RankAssignments]
    """Assignments by rank."""
    expert_assignments: list[int]
    """Assignments by logical expert; expert e lives on rank e // (experts / ranks)."""
    replicas: list[Replica]
    stage_seconds: list[dict[str, float]]
    """Time in each stage, by rank; empty for a rank without this record."""


def batch_detail(held: Held, batch: int) -> BatchDetail:
    """Batch ``batch``, layer by layer. Raises NotHeldError."""
    records, *own = _only("batch", batch, held.primary, *held.own)
    if not len(records):
        raise NotHeldError(f"no records of batch {batch} are held")
    layers = [_batch_layer(records[i : i + 1], own) for i in range(len(records))]
    moved = sum(layer.bytes_moved for layer in layers)
    return BatchDetail(summary=_batch_snapshot(records, moved), layers=layers)


def batch_layer_detail(held: Held, batch: int, layer: int) -> BatchLayerDetail:
    """Layer ``layer`` of batch ``batch``, with its plan. Raises NotHeldError."""
    records, *own = _only("layer", layer, *_only("batch", batch, held.primary, *held.own))
    if not len(records):
        raise NotHeldError(f"no records of layer {layer} of batch {batch} are held")
    return BatchLayerDetail(
        **_head(records[0]),
        summary=_batch_layer(records[:1], own),
        ranks=rank_assignments(records[:1]),
        expert_assignments=records[0]["expert_load"].tolist(),
        replicas=_replicas(records[0], held.header.shape.num_masters, own),
        stage_seconds=[stage_seconds(r["stage_ns"][0]) if len(r) else {} for r in own],
    )


def _only(field: str, value: int, *ranks: RecordArray) -> list[RecordArray]:
    """Of each rank's records those with ``value``."""
    return [records[records[field] == value] for records in ranks]


def _batch_layer(record: RecordArray, own: Sequence[RecordArray]) -> BatchLayer:
    """From the primary rank's ``record`` (1,) and each rank's own records of the batch."""
    layer = int(record["layer"][0])
    mine = np.concatenate(_only("layer", layer, *own))
    _, decision, reason = decision_names(Decision(int(record["decision"][0])))
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
        stage_seconds=stage_seconds(mine["stage_ns"].max(axis=0, initial=0)),
    )


def _replicas(record: np.void, masters: int, own: Sequence[RecordArray]) -> list[Replica]:
    """Of the primary rank's ``record``, from each rank's ``own`` of the same layer and batch."""
    experts, loads = record["slot_expert"], record["slot_load"]
    filled = (experts >= 0).sum(axis=1)
    received = [int(records["bytes_received"].sum()) for records in own]
    return [
        Replica(
            expert=int(experts[rank, slot]),
            home_rank=int(experts[rank, slot]) // max(1, masters),
            rank=rank,
            slot=slot,
            assignments=int(loads[rank, slot]),
            bytes=received[rank] // int(filled[rank]),
        )
        for rank, slot in np.argwhere(experts >= 0).tolist()
    ]
