"""Figures of the rows held, as the interface answers them.

Imbalance is max/mean of assignments over ranks, per layer and batch. Time imbalance has the speeds
of ranks as weights: the busiest rank's time over what it would be if all ended together. Where
ranks are equally fast both are the same.

Savings: a layer is finished when its busiest rank is, so the engine's part of a layer (stage
``compute``: dispatch, expert kernel, combine) took as long as the busiest rank needed for its
assignments. Without balancing it would have taken longer in proportion to the busiest rank's
time by routing alone. This overstates the savings where a part of the engine's time does not
depend on the load.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.sidecar.documents import (
    BalanceSnapshot,
    BatchesCount,
    BatchList,
    BatchSnapshot,
    Heatmap,
    History,
    ImbalanceSnapshot,
    LayerDetail,
    LayerPlan,
    LayerSnapshot,
    RankAssignments,
    RankSnapshot,
    Replica,
    ReplicaCount,
    Savings,
    Spread,
    WindowFigures,
)
from ultraep_serve.sidecar.proof import self_check_of, verification_of
from ultraep_serve.sidecar.store import Held, NotHeldError
from ultraep_serve.sidecar.window import WINDOW_SECONDS, Rows, considered
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, Policy, Stage

__all__ = [
    "batch_list",
    "decision_names",
    "heatmap",
    "history",
    "layer_detail",
    "mean_floor",
    "rank_speeds",
    "spent_seconds",
    "spread",
    "summarise",
]

_STEP_SECONDS = 5  # of the history
_OWN_STAGES = [Stage.COUNT, Stage.PLAN, Stage.REPLICATE, Stage.REROUTE, Stage.WAIT]


class DecisionNames(NamedTuple):
    """What happened to a batch or to one MoE layer of it, in the words of the interface."""

    phase: str  # prefill; decode: batches below min_batch_tokens, whose loads are not counted
    decision: str  # planned, forced (policy ideal) or identity (every token to its master)
    reason: str


_DONE = {
    Decision.PLANNED: ("planned", "imbalanced"),
    Decision.FORCED: ("forced", "measuring"),
}


def decision_names(decision: Decision) -> DecisionNames:
    """The names that ``decision`` stands for."""
    phase = "decode" if decision is Decision.SMALL else "prefill"
    return DecisionNames(phase, *_DONE.get(decision, ("identity", decision.name.lower())))


def summarise(held: Held, since_ns: int = 0, policy: Policy | None = None) -> BalanceSnapshot:
    """The balance over the rows since ``since_ns`` (Unix time) under ``policy``; None: under any.

    Batches are counted since the engine started.
    """
    stages = {stage: _selected(rows, since_ns, policy) for stage, rows in held.stages.items()}
    rows = considered(_selected(held.rows, since_ns, policy), policy)
    header = held.header
    return BalanceSnapshot(
        **vars(_figures(rows)),
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_slots,
        host_ranks=[view.state.rank for view in held.ranks],
        window_records=len(rows),
        batches=_batches(header),
        savings=_savings(rows, list(stages.values())),
        costs=asdict(held.costs) if held.costs else None,
        self_check=self_check_of(held.headers),
        verification=verification_of(held.headers, is_off=bool(held.switched_off)),
        layers=[_layer(layer, part) for layer, part in _parts_by(rows, "layer")],
        ranks=_ranks(held, stages, policy),
    )


def _selected(rows: Rows, since_ns: int, policy: Policy | None) -> Rows:
    if not since_ns and policy is None:
        return rows
    keep = rows["time_ns"] >= np.uint64(since_ns)
    if policy is not None:
        keep &= rows["policy"] == policy.code
    return rows.where(keep)


def _batches(header: RingHeader) -> BatchesCount:
    counts = map(sum, zip(header.recorded_batches, header.skipped_batches, strict=True))
    skipped = dict(zip((decision.name.lower() for decision in Decision), counts, strict=True))
    return BatchesCount(planned=skipped.pop(Decision.PLANNED.name.lower()), skipped=skipped)


def _figures(rows: Rows) -> WindowFigures:
    count = ReplicaCount(mean=None, max=None, new=None)
    if len(rows):
        replicas, new = rows["replicas"], np.count_nonzero(rows["is_copied"]) / len(rows)
        count = ReplicaCount(mean=float(replicas.mean()), max=int(replicas.max()), new=new)
    return WindowFigures(
        imbalance=_imbalance(rows),
        time_imbalance=_imbalance(rows, "time_"),
        floor=mean_floor(rows),
        replicas=count,
        bytes_moved=int(rows["bytes_sent"].sum()),
    )


def _imbalance(rows: Rows, of: str = "") -> ImbalanceSnapshot:
    return ImbalanceSnapshot(before=spread(rows[f"{of}before"]), after=spread(rows[f"{of}after"]))


def spread(values: NDArray[Any]) -> Spread:
    """The spread of ``values`` (n,)."""
    if not len(values):
        return Spread()
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return Spread(mean=float(values.mean()), p50=p50, p99=p99, max=float(values.max()))


def mean_floor(rows: Rows) -> float:
    """The mean of the floor of ``rows``; 1.0 where there are none."""
    return float(rows["floor"].mean()) if len(rows) else 1.0


def rank_speeds(rows: Rows) -> list[float]:
    """Speeds of all ranks in the last of ``rows``; none where there are no rows."""
    speeds: list[float] = (rows["speed"][-1:].ravel() / FULL_SPEED).round(4).tolist()
    return speeds


def _savings(rows: Rows, stages: Sequence[Rows]) -> Savings:
    """Of the layers that a policy considered, ``rows``, and all rows of all ``stages``."""
    totals = [of_stage["stage_ns"].sum(axis=0, dtype=np.float64) for of_stage in stages]
    avoided = rows["avoided"]
    saved, worsened = float(avoided[avoided > 0].sum()), -float(avoided[avoided < 0].sum())
    spent = float(spent_seconds(np.concatenate(totals)) if totals else 0.0) + worsened
    return Savings(saved_seconds=saved, spent_seconds=spent, net_seconds=saved - spent)


def spent_seconds(stage_ns: ArrayLike) -> NDArray[np.float64]:
    """Time that balancing took on the critical path, from the totals ``stage_ns`` (..., R, stages).

    Ranks without any time have no records and are ignored.
    """
    totals = np.asarray(stage_ns, dtype=np.float64)
    own = totals[..., _OWN_STAGES].sum(axis=-1).max(axis=-1, initial=0)
    waited = np.where(totals.any(axis=-1), totals[..., Stage.EXCHANGE], np.inf)
    least = waited.min(axis=-1, initial=np.inf)
    spent: NDArray[np.float64] = (own + np.where(np.isinf(least), 0, least)) / 1e9
    return spent


def _layer(layer: int, rows: Rows) -> LayerSnapshot:
    return LayerSnapshot(**vars(_figures(rows)), layer=layer, records=len(rows))


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
            "stage_seconds": _by_stage(means[rank]),
        }
        for rank, assignments in enumerate(_assignments(rows))
    ]


def _by_stage(stage_ns: NDArray[np.floating]) -> dict[str, float]:
    """Seconds by name of stage, from ``stage_ns`` (stages,)."""
    return {stage.name.lower(): float(stage_ns[stage] / 1e9) for stage in Stage}


def _assignments(rows: Rows) -> list[RankAssignments]:
    """Assignments of every rank of the whole group, summed over ``rows`` of a pipeline stage."""
    before = rows["load_before"].sum(axis=0, dtype=np.int64).tolist()
    after = rows["load_after"].sum(axis=0, dtype=np.int64).tolist()
    mean = sum(before) / len(before)
    speeds = [1.0] * len(before)
    if len(rows):
        speeds = np.round(rows["speed"].mean(axis=0) / FULL_SPEED, 4).tolist()
    of_ranks = zip(before, after, speeds, strict=True)
    return [RankAssignments(before=b, after=a, mean=mean, speed=s) for b, a, s in of_ranks]


def _parts_by(rows: Rows, name: str) -> Iterator[tuple[int, Rows]]:
    """Every value of the column ``name``, ascending, and the ``rows`` that have it, in order."""
    order = np.argsort(rows[name], kind="stable")
    values, starts = np.unique(rows[name][order], return_index=True)
    for value, places in zip(values.tolist(), np.split(order, starts[1:]), strict=False):
        yield value, rows.at(places)


def layer_detail(held: Held, layer: int) -> LayerDetail:
    """MoE layer ``layer``, counted over all stages. Raises NotHeldError."""
    of_layer = held.rows.where(held.rows["layer"] == layer)
    if not len(of_layer):
        raise NotHeldError(f"no records of layer {layer} are held")
    rows = considered(of_layer)
    return LayerDetail(
        **vars(_layer(layer, rows)),
        ranks=_assignments(rows),
        last=_plan(of_layer.at(np.array([len(of_layer) - 1])), held.header.shape.num_masters),
    )


def _plan(rows: Rows, num_masters: int) -> LayerPlan:
    """That of the only one of ``rows``."""
    row = rows.first()
    _, decision, reason = decision_names(Decision(int(row["decision"])))
    return LayerPlan(
        batch=int(row["batch"]),
        time_ns=int(row["time_ns"]),
        policy=list(Policy)[row["policy"]].value,
        tokens=int(row["tokens"]),
        decision=decision,
        reason=reason,
        imbalance_before=float(row["before"]),
        imbalance_after=float(row["after"]),
        time_imbalance_before=float(row["time_before"]),
        time_imbalance_after=float(row["time_after"]),
        avoided_seconds=float(row["avoided"]),
        ranks=_assignments(rows),
        expert_assignments=row["expert_load"].tolist(),
        replicas=_replicas(row, num_masters),
        stage_seconds=[_by_stage(of_rank) if of_rank.any() else {} for of_rank in row["stage_ns"]],
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


def heatmap(held: Held) -> Heatmap:
    """Load of the ranks in each layer, the busiest of each batch first: the imbalance."""
    layers: list[int] = []
    relative: dict[str, list[list[float]]] = {"before": [], "after": []}
    for layer, rows in _parts_by(considered(held.rows), "layer"):
        layers.append(layer)
        for when, found in relative.items():
            loads = np.sort(rows[f"load_{when}"], axis=1)[:, ::-1]
            means = np.maximum(loads.mean(axis=1, keepdims=True), 1e-9)
            found.append(np.round((loads / means).mean(axis=0), 4).tolist())
    return Heatmap(layers=layers, before=relative["before"], after=relative["after"])


def history(held: Held, now_seconds: int) -> History:
    """The last 15 minutes up to ``now_seconds`` (Unix time), without the step that is running."""
    begin = now_seconds // _STEP_SECONDS * _STEP_SECONDS - WINDOW_SECONDS
    num_steps = WINDOW_SECONDS // _STEP_SECONDS
    rows = considered(held.rows)
    step = ((rows["time_ns"] // 10**9).astype(np.int64) - begin) // _STEP_SECONDS
    inside = (step >= 0) & (step < num_steps)
    rows, step = rows.where(inside), step[inside]
    counts = np.bincount(step, minlength=num_steps)

    def where_known(values: NDArray[np.float64]) -> list[float | None]:
        return [v if n else None for v, n in zip(values.tolist(), counts.tolist(), strict=True)]

    def means(name: str) -> list[float | None]:
        return where_known(np.bincount(step, rows[name], num_steps) / np.maximum(counts, 1))

    def maxima(name: str) -> list[float | None]:
        most = np.zeros(num_steps)
        np.maximum.at(most, step, rows[name])
        return where_known(most)

    return History(
        step_seconds=_STEP_SECONDS,
        time_seconds=[begin + number * _STEP_SECONDS for number in range(num_steps)],
        before_mean=means("before"),
        before_max=maxima("before"),
        after_mean=means("after"),
        after_max=maxima("after"),
    )


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
    found = [_batch(number, part) for number, part in _parts_by(rows, "batch")]
    return BatchList(batches=found[::-1], next_before=int(numbers[-1]) if more else None)


def _batch(number: int, rows: Rows) -> BatchSnapshot:
    codes, counts = np.unique(rows["decision"], return_counts=True)
    return BatchSnapshot(
        batch=number,
        time_ns=int(rows["time_ns"][-1]),
        policy=list(Policy)[rows["policy"][-1]].value,
        tokens=int(rows["tokens"][-1]),
        layers={
            Decision(code).name.lower(): count
            for code, count in zip(codes.tolist(), counts.tolist(), strict=True)
        },
        imbalance=_imbalance(rows),
        time_imbalance=_imbalance(rows, "time_"),
        replicas=int(rows["replicas"].sum(dtype=np.int64)),
        new_replicas=int(np.count_nonzero(rows["is_copied"])),
        bytes_moved=int(rows["bytes_sent"].sum()),
        avoided_seconds=float(rows["avoided"].sum()),
    )
