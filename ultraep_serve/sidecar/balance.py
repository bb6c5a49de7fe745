"""The balance over a window: the one answer that the page, `status` and programs read."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ultraep_serve.sidecar.documents import Answer, RankState, Readiness
from ultraep_serve.sidecar.figures import (
    ImbalanceSnapshot,
    RankAssignments,
    WindowFigures,
    seconds_by_stage,
    spent_seconds,
)
from ultraep_serve.sidecar.layers import BatchSnapshot, LayerSnapshot, newest_batch, of_layers
from ultraep_serve.sidecar.proof import (
    SelfCheckSnapshot,
    VerificationSnapshot,
    self_check_of,
    verification_of,
)
from ultraep_serve.sidecar.store import Held, Run
from ultraep_serve.sidecar.window import Rows, considered
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, Policy

_STEP_SECONDS = 5  # of the history


class Savings(Answer):
    """Estimated seconds that balancing saved and spent over the window."""

    saved_seconds: float
    """Time of the engine's part of each layer that balancing avoided: the measured time, times
    (assignments of the busiest rank before / after - 1), over speeds where those differ."""
    spent_seconds: float
    """Time that balancing took: count, plan, replicate, reroute and wait on the slowest rank;
    exchange on the rank that waited least (the others wait for it, as they would at dispatch);
    and the extra time of layers whose busiest rank got more assignments than before."""
    net_seconds: float
    """Saved minus spent; negative where balancing costs more than it saves."""


class BatchesCount(Answer):
    """Batches (forward passes) since the engine started, by decision."""

    planned: int
    """At least one layer had replicas placed."""
    skipped: dict[str, int]
    """By the reason why every token went to its expert's home rank. small: decode, batches below
    min_batch_tokens, which are left alone."""


class RankSnapshot(RankState):
    """One rank over the window."""

    assignments: RankAssignments
    bytes_sent: int
    bytes_received: int
    stage_seconds: dict[str, float]
    """Mean time by stage, over the layers in which it ran; compute is the engine's own part."""


class Step(Answer):
    """Imbalance in a few seconds."""

    time_seconds: int
    """Unix time at which they begin."""
    imbalance: ImbalanceSnapshot


class BalanceSnapshot(Readiness, WindowFigures):
    """The balance over the window."""

    engine: str
    mode: str
    """tensor: all ranks see the same tokens; data: each its own."""
    policy: str
    """Now in force."""
    policies: list[str]
    """Those that may be put in force."""
    num_ranks: int
    """Of the whole group, over all hosts."""
    num_layers: int
    """MoE layers."""
    num_experts: int
    """Logical experts of a layer."""
    num_slots: int
    """Replica slots of a rank."""
    window_records: int
    """Layers of batches in the window whose loads the policy considered."""
    batches: BatchesCount
    savings: Savings
    costs: dict[str, int | float] | None
    """The cost model that decides whether moving weights pays, measured at start or given; null
    until it is known."""
    self_check: SelfCheckSnapshot
    verification: VerificationSnapshot
    history: list[Step]
    """Oldest first; a step in which no load was looked at is left out."""
    last_batch: BatchSnapshot | None
    """The newest; null before any."""
    layers: list[LayerSnapshot]
    ranks: list[RankSnapshot]
    """Of this host. Assignments, imbalance, batches and replicas cover the whole group; health,
    bytes and times cover these ranks."""


def summarise(run: Run, since_ns: int = 0, policy: Policy | None = None) -> BalanceSnapshot:
    """The balance over the rows since ``since_ns`` (Unix time) under ``policy``; None: under any.

    Batches are counted since the engine started. Raises NoRunError.
    """
    held = run.held()
    stages = {stage: _selected(rows, since_ns, policy) for stage, rows in held.stages.items()}
    selected, header = _selected(held.rows, since_ns, policy), held.header
    rows = considered(selected, policy)
    return BalanceSnapshot.of(
        rows,
        **vars(run.readiness),
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        policies=run.policies,
        num_ranks=header.shape.num_ranks,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_slots,
        window_records=len(rows),
        batches=_batches(header),
        savings=_savings(rows, list(stages.values())),
        costs=asdict(held.costs) if held.costs else None,
        self_check=self_check_of(held.headers),
        verification=verification_of(held.headers, is_off=bool(held.switched_off)),
        history=_history(rows),
        last_batch=newest_batch(selected),
        layers=of_layers(rows),
        ranks=_ranks(held, stages, policy),
    )


def _selected(rows: Rows, since_ns: int, policy: Policy | None) -> Rows:
    if not since_ns and policy is None:
        return rows
    keep = rows["time_ns"] >= np.uint64(since_ns)
    if policy is not None:
        keep &= rows["policy"] == policy.code
    return rows.where(keep)


def _history(rows: Rows) -> list[Step]:
    step_ns = np.uint64(_STEP_SECONDS * 10**9)
    return [
        Step(time_seconds=number * _STEP_SECONDS, imbalance=ImbalanceSnapshot.of(part))
        for number, part in rows.by(rows["time_ns"] // step_ns)
    ]


def _batches(header: RingHeader) -> BatchesCount:
    counts = map(sum, zip(header.recorded_batches, header.skipped_batches, strict=True))
    skipped = dict(zip((decision.name.lower() for decision in Decision), counts, strict=True))
    return BatchesCount(planned=skipped.pop(Decision.PLANNED.name.lower()), skipped=skipped)


def _savings(rows: Rows, stages: Sequence[Rows]) -> Savings:
    """Of the layers that a policy considered, ``rows``, and all rows of all ``stages``."""
    totals = [of_stage["stage_ns"].sum(axis=0, dtype=np.float64) for of_stage in stages]
    avoided = rows["avoided"]
    saved, worsened = float(avoided[avoided > 0].sum()), -float(avoided[avoided < 0].sum())
    spent = float(spent_seconds(np.concatenate(totals)) if totals else 0.0) + worsened
    return Savings(saved_seconds=saved, spent_seconds=spent, net_seconds=saved - spent)


def _ranks(held: Held, stages: dict[int, Rows], policy: Policy | None) -> list[RankSnapshot]:
    """Every rank of this host, over the layers of its own pipeline stage."""
    found = {stage: _by_rank(considered(rows, policy)) for stage, rows in stages.items()}
    unknown = _by_rank(held.rows.at(np.empty(0, np.intp)))  # of a stage whose rings are lost
    snapshots = []
    for view in held.ranks:
        stage, rank = divmod(view.state.rank, held.header.shape.num_ranks)
        snapshots.append(RankSnapshot(**vars(view.state), **found.get(stage, unknown)[rank]))
    return snapshots


def _by_rank(rows: Rows) -> list[dict[str, Any]]:
    """The figures of ``RankSnapshot`` that follow from ``rows``, for every rank of their stage."""
    sent, received = (rows[name].sum(axis=0).tolist() for name in ("bytes_sent", "bytes_received"))
    times = rows["stage_ns"]
    means = times.sum(axis=0, dtype=np.float64) / np.maximum((times > 0).sum(axis=0), 1)
    return [
        {
            "assignments": assignments,
            "bytes_sent": sent[rank],
            "bytes_received": received[rank],
            "stage_seconds": seconds_by_stage(means[rank]),
        }
        for rank, assignments in enumerate(RankAssignments.of(rows))
    ]
