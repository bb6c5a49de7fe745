"""Batches put together from the records of their layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.savings import avoided_seconds
from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import ImbalanceSnapshot, imbalance_snapshot
from ultraep_serve.types import Decision, Policy

__all__ = ["BatchList", "BatchSnapshot", "batch_snapshot", "batch_snapshots", "count_batches"]


@dataclass(frozen=True)
class BatchSnapshot(Documented):
    """One batch: its layers taken together."""

    batch: int
    """Number of the forward pass since the engine started; the same on every rank."""
    time_ns: int
    """Unix time of its last layer."""
    policy: str
    """Policy in force for it."""
    tokens: int
    """Tokens, over all ranks."""
    layers: dict[str, int]
    """Its MoE layers by decision."""
    imbalance: ImbalanceSnapshot
    """Over its layers."""
    replicas: int
    """Replicas placed, over all layers and ranks."""
    bytes_moved: int
    """Expert weights sent by all ranks."""
    avoided_seconds: float
    """Estimated time that evening out the busiest rank took off its layers; negative where
    they took longer."""


@dataclass(frozen=True)
class BatchList(Documented):
    """Batches, newest first."""

    batches: list[BatchSnapshot]
    next_before: int | None = None
    """Give it as ``before`` for the next page; null where this is the last."""
    schema_version: int = SCHEMA_VERSION


def count_batches(records: RecordArray) -> dict[Decision, int]:
    """Batches in the lead's ``records`` by decision: planned if any layer was, else the first's."""
    counts: dict[Decision, int] = {}
    _, first = np.unique(records["batch"], return_index=True)
    planned = set(records["batch"][records["decision"] == Decision.PLANNED].tolist())
    for batch, code in zip(
        records["batch"][first].tolist(), records["decision"][first].tolist(), strict=True
    ):
        decision = Decision.PLANNED if batch in planned else Decision(code)
        counts[decision] = counts.get(decision, 0) + 1
    return counts


def batch_snapshots(
    lead: RecordArray, ranks: Sequence[RecordArray], limit: int, before: int | None = None
) -> BatchList:
    """The newest ``limit`` batches of the lead's records, with numbers below ``before``.

    ``ranks`` are each rank's own records.
    """
    batches = np.unique(lead["batch"])[::-1]
    if before is not None:
        batches = batches[batches < np.uint64(before)]
    more, batches = len(batches) > limit, batches[:limit]
    moved = {int(batch): 0 for batch in batches}
    for own in ranks:
        recent = own[np.isin(own["batch"], batches)]
        for batch, sent in zip(
            recent["batch"].tolist(), recent["bytes_sent"].tolist(), strict=True
        ):
            moved[batch] += sent
    numbers = lead["batch"]
    return BatchList(
        [batch_snapshot(lead[numbers == batch], moved[int(batch)]) for batch in batches],
        next_before=int(batches[-1]) if more else None,
    )


def batch_snapshot(records: RecordArray, moved: int) -> BatchSnapshot:
    """The batch of the lead's ``records``, for which all ranks sent ``moved`` bytes."""
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
        replicas=int(records["replicas"].sum(dtype=np.int64)),
        bytes_moved=moved,
        avoided_seconds=float(avoided_seconds(records).sum()),
    )
