"""Single layers and batches: what is answered of them."""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ultraep_serve.sidecar.documents import Answer, Document
from ultraep_serve.sidecar.figures import (
    ImbalanceSnapshot,
    RankAssignments,
    WindowFigures,
    decision_names,
    seconds_by_stage,
)
from ultraep_serve.sidecar.store import Held
from ultraep_serve.sidecar.window import Rows, considered
from ultraep_serve.types import Decision, Policy


class LayerSnapshot(WindowFigures):
    """One MoE layer over the window."""

    layer: int
    """Counted from 0 over MoE layers, in the order they run."""
    records: int
    """Batches in which the policy considered this layer's loads."""
    load_before: list[float]
    """Load of the ranks over their mean, by routing alone, as the mean over batches; those of each
    batch from the busiest rank on, whichever it is, so that the first is the mean imbalance."""
    load_after: list[float]
    """The same, as computed."""


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


class InBatch(Answer):
    """What all that is said of one batch begins with."""

    batch: int
    """Number of the forward pass since the engine started, the same on every rank."""
    time_ns: int
    """Unix time at its end."""
    policy: str
    """Policy in force."""
    tokens: int
    """Tokens of the batch, over all ranks."""
    avoided_seconds: float
    """Estimated time that balancing took off; negative where layers took longer."""

    @classmethod
    def of(cls, rows: Rows, **others: Any) -> Self:
        """That of ``rows`` of one batch, and the ``others`` of an answer that has more."""
        return cls(
            batch=int(rows["batch"][-1]),
            time_ns=int(rows["time_ns"][-1]),
            policy=list(Policy)[rows["policy"][-1]].value,
            tokens=int(rows["tokens"][-1]),
            avoided_seconds=float(rows["avoided"].sum()),
            **others,
        )


class LayerPlan(InBatch):
    """How a layer of one batch was balanced."""

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
    ranks: list[RankAssignments]
    """Assignments by rank."""
    expert_assignments: list[int]
    """Assignments by logical expert; expert e lives on rank e // (experts / ranks)."""
    replicas: list[Replica]
    """Copies of experts in slots."""
    stage_seconds: list[dict[str, float]]
    """Time in each stage, by rank; empty for a rank without this record."""


class LayerDetail(Document, LayerSnapshot):
    """One MoE layer over the window, and its last plan."""

    ranks: list[RankAssignments]
    """Of every rank of the whole group, summed over the window."""
    last: LayerPlan
    """In the newest batch."""


class BatchSnapshot(InBatch):
    """One batch: its layers taken together."""

    layers: dict[str, int]
    """Its MoE layers by decision."""
    imbalance: ImbalanceSnapshot
    """Over its layers."""
    time_imbalance: ImbalanceSnapshot
    """Of assignments over speeds; the same where ranks are equally fast."""
    replicas: int
    """Replicas that compute, over all layers and ranks."""
    new_replicas: int
    """Experts that were copied in the batch, a few for batches to come only."""
    bytes_moved: int
    """Expert weights sent by the ranks of this host."""


class BatchList(Document):
    """Batches, newest first."""

    batches: list[BatchSnapshot]
    next_before: int | None = None
    """Value of the parameter ``before`` for the next page; null on the last page."""


def of_layers(rows: Rows) -> list[LayerSnapshot]:
    """Every layer of which there are ``rows``."""
    return [
        LayerSnapshot.of(part, **_of_layer(layer, part)) for layer, part in rows.by(rows["layer"])
    ]


def _of_layer(layer: int, rows: Rows) -> dict[str, Any]:
    """What ``LayerSnapshot`` has of its own."""
    relative = {}
    for when in ("before", "after"):
        loads = np.sort(rows[f"load_{when}"], axis=1)[:, ::-1]
        means = np.maximum(loads.mean(axis=1, keepdims=True), 1e-9)
        shares = (loads / means).sum(axis=0) / max(1, len(rows))
        relative[f"load_{when}"] = np.round(shares, 4).tolist()
    return {"layer": layer, "records": len(rows), **relative}


def layer_detail(held: Held, layer: int) -> LayerDetail | None:
    """MoE layer ``layer``, counted over all stages; None where no records of it are held."""
    of_layer = held.rows.where(held.rows["layer"] == layer)
    if not len(of_layer):
        return None
    rows = considered(of_layer)
    return LayerDetail.of(
        rows,
        **_of_layer(layer, rows),
        ranks=RankAssignments.of(rows),
        last=_plan(of_layer.at(np.array([len(of_layer) - 1])), held.header.shape.num_masters),
    )


def _plan(rows: Rows, num_masters: int) -> LayerPlan:
    """That of the only one of ``rows``."""
    row = rows.first()
    _, decision, reason = decision_names(Decision(int(row["decision"])))
    return LayerPlan.of(
        rows,
        decision=decision,
        reason=reason,
        imbalance_before=float(row["before"]),
        imbalance_after=float(row["after"]),
        time_imbalance_before=float(row["time_before"]),
        time_imbalance_after=float(row["time_after"]),
        ranks=RankAssignments.of(rows),
        expert_assignments=row["expert_load"].tolist(),
        replicas=_replicas(row, num_masters),
        stage_seconds=[
            seconds_by_stage(of_rank) if of_rank.any() else {} for of_rank in row["stage_ns"]
        ],
    )


def _replicas(row: Mapping[str, Any], num_masters: int) -> list[Replica]:
    experts, loads, is_copied = row["slot_expert"], row["slot_load"], row["is_copied"]
    expert_bytes = row["bytes_received"] // np.maximum(is_copied.sum(axis=1), 1)
    return [
        Replica(
            expert=int(experts[rank, slot]),
            home_rank=int(experts[rank, slot]) // max(1, num_masters),
            rank=rank,
            slot=slot,
            assignments=int(loads[rank, slot]),
            bytes=int(expert_bytes[rank] * is_copied[rank, slot]),
        )
        for rank, slot in np.argwhere(experts >= 0).tolist()
    ]


def batch_list(held: Held, limit: int, before: int | None) -> BatchList:
    """The newest ``limit`` batches, numbered below ``before``."""
    rows = held.rows
    numbers = np.unique(rows["batch"])[::-1]
    if before is not None:
        numbers = numbers[numbers < np.uint64(before)]
    more, numbers = len(numbers) > limit, numbers[:limit]
    if not len(numbers):
        return BatchList(batches=[])
    rows = rows.where((rows["batch"] >= numbers[-1]) & (rows["batch"] <= numbers[0]))
    found = [_batch(part) for _, part in rows.by(rows["batch"])]
    return BatchList(batches=found[::-1], next_before=int(numbers[-1]) if more else None)


def newest_batch(rows: Rows) -> BatchSnapshot | None:
    """The one with the highest number; None where there are no ``rows``."""
    return _batch(rows.where(rows["batch"] == rows["batch"].max())) if len(rows) else None


def _batch(rows: Rows) -> BatchSnapshot:
    codes, counts = np.unique(rows["decision"], return_counts=True)
    return BatchSnapshot.of(
        rows,
        layers={
            Decision(code).name.lower(): count
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
        },
        imbalance=ImbalanceSnapshot.of(rows),
        time_imbalance=ImbalanceSnapshot.of(rows, "time_"),
        replicas=int(rows["replicas"].sum(dtype=np.int64)),
        new_replicas=int(np.count_nonzero(rows["is_copied"])),
        bytes_moved=int(rows["bytes_sent"].sum()),
    )
