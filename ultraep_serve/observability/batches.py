"""Batches put together from the records of their layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import ImbalanceSnapshot, imbalance_snapshot
from ultraep_serve.types import Decision, Policy

__all__ = ["BatchList", "BatchSnapshot", "batch_snapshots", "count_batches"]


@dataclass(frozen=True)
class BatchSnapshot:
    """One batch: its layers taken together."""

    batch: int
    time_ns: int  # wall clock, of its last layer
    policy: str
    tokens: int  # over all ranks
    layers: dict[str, int]  # by decision
    imbalance: ImbalanceSnapshot  # over its layers
    replicas: int  # over its layers
    bytes_moved: int  # sent by all ranks


@dataclass(frozen=True)
class BatchList:
    """Batches, newest first."""

    batches: list[BatchSnapshot]
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


def batch_snapshots(lead: RecordArray, ranks: Sequence[RecordArray], limit: int) -> BatchList:
    """The newest ``limit`` batches of the lead's records; ``ranks`` are each rank's own records."""
    batches = np.unique(lead["batch"])[::-1][:limit]
    moved = {int(batch): 0 for batch in batches}
    for own in ranks:
        recent = own[np.isin(own["batch"], batches)]
        for batch, sent in zip(
            recent["batch"].tolist(), recent["bytes_sent"].tolist(), strict=True
        ):
            moved[batch] += sent
    return BatchList(
        [_batch_snapshot(lead[lead["batch"] == batch], moved[int(batch)]) for batch in batches]
    )


def _batch_snapshot(records: RecordArray, moved: int) -> BatchSnapshot:
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
    )
