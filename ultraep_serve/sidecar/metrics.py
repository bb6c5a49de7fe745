"""Prometheus metrics, built from the rings at every scrape.

Counters are those of the ranks, so nothing is lost between polls; they start at zero again with the
engine, as Prometheus expects of counters.

Phase is prefill or decode (batches below min_batch_tokens, which are not balanced and whose loads
are not counted). Decision is planned, forced or identity; reason is imbalanced, measuring, small,
policy_off, balanced, inconsistent or unprofitable.

Where ranks are on several hosts, each host's sidecar reports bytes, times and health of its own
ranks; imbalance, batches, layers and replicas cover all ranks and are the same on every host.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ultraep_serve.sidecar.figures import decision_names, mean_floor, rank_speeds, spent_seconds
from ultraep_serve.sidecar.proof import verification_of
from ultraep_serve.sidecar.store import Held, RankView, RunStore
from ultraep_serve.sidecar.window import BOUNDS, Totals, considered
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, Stage

_Samples = Iterable[tuple[tuple[object, ...], float]]  # values of labels, and the value


class StoreCollector(Collector):
    """The metrics of one scrape."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Poll once and build every metric; without an engine only readiness."""
        run = self._store.poll()
        yield _gauge(
            "unbalanced",
            "1 when the server could not be balanced and runs all the same; other metrics are then "
            "absent.",
            bool(run.unbalanced),
        )
        if run.unbalanced:
            return
        yield _gauge(
            "ready", "1 when every rank of this host is alive and ready, else 0.", not run.problems
        )
        if run.readable is None:
            return
        held = run.readable
        yield from _imbalances(held.totals)
        yield from _of_run(held)
        yield from _proof(held)
        yield from _of_host(held.headers, held.totals)
        yield from _of_ranks(held.ranks)


def _family(
    make: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    samples: _Samples | float,
    *labels: str,
) -> Metric:
    """With ``samples`` a value by labels, or one without any."""
    family = make(f"ultraep_{name}", text, labels=labels)
    for values, value in [((), samples)] if isinstance(samples, (int, float)) else samples:
        family.add_metric(list(map(str, values)), value)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _imbalances(totals: Totals) -> Iterator[Metric]:
    for prefix, text in (
        (
            "",
            "Max/mean of assignments over ranks, one observation per MoE layer of a batch that the "
            "policy considered; 1 is perfect. when=before: by routing alone; when=after: as "
            "computed.",
        ),
        (
            "time_",
            "As ultraep_imbalance_ratio, of assignments over the speeds of ranks: what policy "
            "quota evens out; the same where ranks are equally fast.",
        ),
    ):
        name = f"ultraep_{prefix}imbalance_ratio"
        family = HistogramMetricFamily(name, text, labels=["phase", "when"])
        for when in ("before", "after"):
            reached = np.cumsum(totals.counts[prefix + when]).astype(float).tolist()
            buckets = list(zip([*map(str, BOUNDS), "+Inf"], reached, strict=True))
            family.add_metric(["prefill", when], buckets, totals.sums[prefix + when])
        yield family


def _of_run(held: Held) -> Iterator[Metric]:
    header, rows = held.header, held.rows
    labels = ("phase", "decision", "reason")
    counts = zip(Decision, header.recorded_batches, header.skipped_batches, strict=True)
    yield _counter(
        "batches",
        "Batches, by decision and reason.",
        ((decision_names(decision), seen + skipped) for decision, seen, skipped in counts),
        *labels,
    )
    yield _counter(
        "layers",
        "MoE layers of batches, by decision and reason.",
        ((decision_names(decision), header.layers[decision]) for decision in Decision),
        *labels,
    )
    yield _counter("replicas", "Replicas that computed, over all ranks.", header.replicas)
    yield _counter("copied_experts", "Experts copied to replicas, over all ranks.", header.copied)
    yield InfoMetricFamily(
        "ultraep_policy",
        "The policy in force, the engine and how its ranks share the work.",
        value={"policy": header.policy.value, "engine": header.engine, "mode": header.mode},
    )
    yield _gauge(
        "imbalance_floor_ratio",
        "Lowest possible mean of ultraep_time_imbalance_ratio, as weights move only inside "
        "domains: the largest domain mean over the mean of all ranks, in the last 15 minutes.",
        mean_floor(considered(rows)),
    )
    yield _gauge(
        "rank_speed_ratio",
        "Speed of the rank that the newest batch was planned with; 1 is as fast as the fastest "
        "rank.",
        (((rank,), speed) for rank, speed in enumerate(rank_speeds(rows))),
        "rank",
    )


def _proof(held: Held) -> Iterator[Metric]:
    found = verification_of(held.headers, is_off=bool(held.switched_off))
    yield _counter(
        "verified_layers",
        "Layers of batches that were checked while serving.",
        (((check,), count.layers) for check, count in found.by_check.items()),
        "check",
    )
    yield _counter(
        "verification_failures",
        "Checks of layers, on ranks of this host, that failed.",
        (((check,), count.failures) for check, count in found.by_check.items()),
        "check",
    )
    yield _gauge(
        "switched_off",
        "1 when a failed check has switched balancing off, until somebody sets a policy.",
        found.switched_off,
    )


def _of_host(headers: Sequence[RingHeader], totals: Totals) -> Iterator[Metric]:
    yield _counter(
        "moved_bytes",
        "Expert weights sent by the ranks of this host.",
        sum(header.bytes_sent for header in headers),
    )
    yield _gauge(
        "slot_reserved_bytes",
        "Memory reserved for replica slots on this host.",
        sum(header.slot_bytes_reserved for header in headers),
    )
    by_stage = {stage: sum(header.stage_ns[stage] for header in headers) for stage in Stage}
    yield _counter(
        "stage_seconds",
        "Time in each stage of balancing and in the engine's part (compute), summed over ranks; "
        "exchange and wait are waiting times.",
        (((stage.name.lower(),), total / 1e9) for stage, total in by_stage.items()),
        "stage",
    )
    yield _counter(
        "estimated_saved_seconds",
        "Estimated time that balancing avoided: the engine's time of each layer x (assignments of "
        "the busiest rank before / after - 1).",
        totals.saved_seconds,
    )
    yield _counter(
        "estimated_spent_seconds",
        "Estimated time that balancing took: its stages on the slowest rank, exchange on the rank "
        "that waited least, and the extra time of layers less balanced than before.",
        float(spent_seconds([header.stage_ns for header in headers])) + totals.worsened_seconds,
    )


_OF_A_RANK = {  # fields of ``RankState``
    "alive": (_gauge, "rank_up", "1 while the rank is alive."),
    "heartbeat_age_seconds": (_gauge, "", "Time since the rank's last heartbeat."),
    "last_batch_age_seconds": (
        _gauge, "", "Time since the rank's last batch; absent before the first."
    ),
    "lost": (_counter, "records_lost", "Records that the rank could not write."),
    "missed": (
        _counter, "records_missed", "Records overwritten or damaged before the sidecar read them."
    ),
}  # fmt: skip


def _of_ranks(ranks: Sequence[RankView]) -> Iterator[Metric]:
    for field, (family, name, text) in _OF_A_RANK.items():
        values = ((view.state.rank, getattr(view.state, field)) for view in ranks)
        known = [((rank,), value) for rank, value in values if value is not None]
        yield family(name or field, text, known, "rank")
