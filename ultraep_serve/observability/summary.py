"""The balance over a window, from the lead rank's records and each rank's own."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.observability.outcomes import outcome
from ultraep_serve.observability.savings import Savings, avoided_seconds, savings, spent_seconds
from ultraep_serve.observability.schema import RecordArray, RingHeader
from ultraep_serve.observability.snapshot import (
    BalanceSnapshot,
    BatchesCount,
    ImbalanceSnapshot,
    LayerSnapshot,
    PhaseSnapshot,
    RankAssignments,
    RankSnapshot,
    RankView,
    Spread,
    imbalances,
    mean_floor,
    replica_count,
    spread,
)
from ultraep_serve.observability.window import Window
from ultraep_serve.types import Decision, Verb

__all__ = ["batches_count", "bytes_by_layer", "phases", "summarise", "window_savings"]


def summarise(
    lead: RecordArray,
    header: RingHeader,
    ranks: Sequence[RankView],
    batches: Mapping[Decision, int],
    window: Window,
) -> BalanceSnapshot:
    """The snapshot over ``window``.

    ``lead`` holds the lead rank's full records and ``header`` its header; ``ranks`` has one view
    per rank of this host; ``batches`` counts the batches of the window by decision.
    """
    weighed = window.weighed(lead)
    own = [window.weighed(view.records) for view in ranks]
    moved = bytes_by_layer(own)
    before, after = imbalances(weighed["load_before"]), imbalances(weighed["load_after"])
    imbalance = ImbalanceSnapshot(spread(before), spread(after))
    assignments = _assignments(weighed)
    return BalanceSnapshot(
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        host_ranks=[view.rank for view in ranks],
        window_records=len(weighed),
        assignments=sum(rank.before for rank in assignments),
        batches=batches_count(batches),
        phases=phases(batches, imbalance),
        imbalance=imbalance,
        floor=mean_floor(weighed["load_before"], header.location.domain_size),
        replicas=replica_count(weighed["replicas"]),
        bytes_moved=sum(moved.values()),
        savings=window_savings(weighed, [window.recorded(view.records) for view in ranks]),
        layers=_layers(weighed, before, after, moved, header.location.domain_size),
        ranks=[
            _rank_snapshot(view, records, assignments[view.rank])
            for view, records in zip(ranks, own, strict=True)
        ],
    )


def window_savings(weighed: RecordArray, own: Sequence[RecordArray]) -> Savings:
    """Savings from the lead's ``weighed`` records and all of each rank's ``own``."""
    totals = [records["verb_ns"].sum(axis=0, dtype=np.uint64) for records in own]
    return savings(avoided_seconds(weighed), float(spent_seconds(totals)))


def bytes_by_layer(ranks: Sequence[RecordArray]) -> dict[int, int]:
    """Bytes that ``ranks`` sent, by layer, from each rank's own records."""
    moved: dict[int, int] = {}
    for own in ranks:
        layers, places = np.unique(own["layer"], return_inverse=True)
        sent = np.bincount(places, own["bytes_sent"])  # in float64, which is exact enough
        for layer, count in zip(layers.tolist(), sent.tolist(), strict=True):
            moved[layer] = moved.get(layer, 0) + int(count)
    return moved


def batches_count(batches: Mapping[Decision, int]) -> BatchesCount:
    """``batches`` by decision, as they are shown."""
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


def _assignments(weighed: RecordArray) -> list[RankAssignments]:
    """Of every rank of the whole group."""
    before = weighed["load_before"].sum(axis=0, dtype=np.int64).tolist()
    after = weighed["load_after"].sum(axis=0, dtype=np.int64).tolist()
    return [RankAssignments(*pair) for pair in zip(before, after, strict=True)]


def _layers(
    weighed: RecordArray,
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    moved: Mapping[int, int],
    domain_size: int,
) -> list[LayerSnapshot]:
    order = np.argsort(weighed["layer"], kind="stable")
    layers, starts = np.unique(weighed["layer"][order], return_index=True)
    return [
        LayerSnapshot(
            layer=layer,
            records=len(places),
            imbalance=ImbalanceSnapshot(spread(before[places]), spread(after[places])),
            floor=mean_floor(weighed["load_before"][places], domain_size),
            replicas=replica_count(weighed["replicas"][places]),
            bytes_moved=moved.get(layer, 0),
        )
        for layer, places in zip(layers.tolist(), np.split(order, starts[1:]), strict=False)
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
        verb_seconds=_verb_spreads(records["verb_ns"]),
        records=len(records),
        lost=header.lost if header else 0,
    )


def _verb_spreads(verb_ns: NDArray[np.unsignedinteger]) -> dict[str, Spread]:
    """Spread of the seconds in each verb, ``verb_ns`` (n, verbs), where it ran at all."""
    by_verb = np.ascontiguousarray(verb_ns.T) / 1e9
    if by_verb.size and (by_verb > 0).all():  # one pass over all verbs
        rows = [
            by_verb.mean(axis=1),
            *np.percentile(by_verb, (50, 99), axis=1),
            by_verb.max(axis=1),
        ]
        spreads = [Spread(*figures) for figures in np.array(rows).T.tolist()]
    else:
        spreads = [spread(times[times > 0]) for times in by_verb]
    return {verb.name.lower(): spreads[verb] for verb in Verb}
