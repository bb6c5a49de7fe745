"""One batch layer by layer, and one of its layers down to the expert."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.observability.batches import BatchSnapshot, batch_snapshot
from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.outcomes import outcome
from ultraep_serve.observability.savings import avoided_seconds
from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import RankAssignments, imbalances
from ultraep_serve.types import Decision, ExpertShape, Verb

__all__ = [
    "BatchDetail",
    "BatchLayer",
    "BatchLayerDetail",
    "Replica",
    "batch_detail",
    "batch_layer_detail",
]


@dataclass(frozen=True)
class BatchLayer(Documented):
    """One MoE layer of one batch."""

    layer: int
    decision: str
    """planned, forced, or identity: every token went to its expert's home rank."""
    reason: str
    """imbalanced, measuring, policy_off, balanced, doubt or unprofitable."""
    imbalance_before: float
    """Max/mean of assignments over ranks, by routing alone."""
    imbalance_after: float
    """Max/mean of assignments over ranks, as computed."""
    replicas: int
    """Replicas placed, over all ranks."""
    bytes_moved: int
    """Expert weights sent by all ranks."""
    avoided_seconds: float
    """Estimated time that evening out the busiest rank took off; negative: it took longer."""
    verb_seconds: dict[str, float]
    """Time in each verb, on the rank where it took longest."""


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
    """Its quota: assignments that the copy computes instead of the master."""
    bytes: int
    """Weights copied into the slot."""


@dataclass(frozen=True)
class BatchLayerDetail(Documented):
    """One MoE layer of one batch with its plan."""

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
    verb_seconds: list[dict[str, float]]
    """Time in each verb, by rank; empty for a rank whose record is gone."""
    schema_version: int = SCHEMA_VERSION


def batch_detail(batch: int, lead: RecordArray, ranks: Sequence[RecordArray]) -> BatchDetail | None:
    """Batch ``batch`` from the lead's and each rank's own records; None where it is not held."""
    records, own = _of_batch(batch, lead, ranks)
    if not len(records):
        return None
    layers = [_batch_layer(records[i : i + 1], own) for i in range(len(records))]
    moved = sum(layer.bytes_moved for layer in layers)
    return BatchDetail(batch_snapshot(records, moved), layers)


def batch_layer_detail(
    batch: int, layer: int, shape: ExpertShape, lead: RecordArray, ranks: Sequence[RecordArray]
) -> BatchLayerDetail | None:
    """Layer ``layer`` of batch ``batch``, with its plan; None where it is not held."""
    records, own = _of_batch(batch, lead, ranks)
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
        ranks=[
            RankAssignments(before, after)
            for before, after in zip(
                record["load_before"].tolist(), record["load_after"].tolist(), strict=True
            )
        ],
        expert_assignments=record["expert_load"].tolist(),
        replicas=_replicas(record, shape, [_received(records, layer) for records in own]),
        verb_seconds=[_verb_seconds(records[records["layer"] == layer]) for records in own],
    )


def _of_batch(
    batch: int, lead: RecordArray, ranks: Sequence[RecordArray]
) -> tuple[RecordArray, list[RecordArray]]:
    number = np.uint64(batch)
    return lead[lead["batch"] == number], [own[own["batch"] == number] for own in ranks]


def _batch_layer(record: RecordArray, own: Sequence[RecordArray]) -> BatchLayer:
    """From the lead's ``record`` (1,) and all records of the batch that each rank wrote."""
    layer = int(record["layer"][0])
    mine = np.concatenate([records[records["layer"] == layer] for records in own])
    _, decision, reason = outcome(Decision(int(record["decision"][0])))
    slowest = mine["verb_ns"].max(axis=0, initial=0) / 1e9
    return BatchLayer(
        layer=layer,
        decision=decision,
        reason=reason,
        imbalance_before=float(imbalances(record["load_before"])[0]),
        imbalance_after=float(imbalances(record["load_after"])[0]),
        replicas=int(record["replicas"][0]),
        bytes_moved=int(mine["bytes_sent"].sum()),
        avoided_seconds=float(avoided_seconds(record)[0]),
        verb_seconds={verb.name.lower(): float(slowest[verb]) for verb in Verb},
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


def _verb_seconds(records: RecordArray) -> dict[str, float]:
    if not len(records):
        return {}
    return {verb.name.lower(): float(records["verb_ns"][0, verb] / 1e9) for verb in Verb}
