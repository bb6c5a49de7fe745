"""Prometheus metrics, built from the rings at every scrape.

Counters are those of the ranks, so nothing is lost between polls; they start at zero again with the
engine, as Prometheus expects of counters. Metrics and their labels:

======================================  ====================================================
ultraep_unbalanced                      1 when the server runs without balancing; then alone
ultraep_ready                           1 when every rank of this host is alive and ready
ultraep_policy_info                     policy, engine, mode: labels, value 1
ultraep_imbalance_ratio                 histogram by phase and when (before, after)
ultraep_time_imbalance_ratio            histogram by phase and when: of assignments over speeds
ultraep_imbalance_floor_ratio           lowest possible mean of ultraep_time_imbalance_ratio
ultraep_batches_total                   by phase, decision and reason
ultraep_layers_total                    by phase, decision and reason
ultraep_replicas_total                  replicas placed
ultraep_moved_bytes_total               weights sent by the ranks of this host
ultraep_stage_seconds_total              by stage, summed over the ranks of this host
ultraep_estimated_saved_seconds_total   time that balancing avoided
ultraep_estimated_spent_seconds_total   time that balancing took
ultraep_rank_up                         by rank
ultraep_rank_speed_ratio                by rank of a pipeline stage: speed that is planned with
ultraep_heartbeat_age_seconds           by rank
ultraep_last_batch_age_seconds          by rank
ultraep_records_lost_total              by rank: could not be written
ultraep_records_missed_total            by rank: overwritten before the sidecar read them
ultraep_slot_reserved_bytes             memory of replica slots on this host
======================================  ====================================================

Phase is prefill or decode (batches below min_batch_tokens, which are not balanced and whose loads
are not counted). Decision is planned, forced or identity; reason is imbalanced, measuring, small,
policy_off, balanced, inconsistent or unprofitable.

Only with ``/metrics?detail=true``: ultraep_layer_imbalance_ratio (layer, when),
ultraep_rank_assignments_ratio (rank, when), ultraep_rank_sent_bytes_total (rank),
ultraep_rank_received_bytes_total (rank), ultraep_rank_stage_seconds_total (rank, stage).

Where ranks are on several hosts, each host's sidecar reports bytes, times and health of its own
ranks; imbalance, batches, layers and replicas cover all ranks and are the same on every host.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ultraep_serve.sidecar.statistics.fold import mean_floor, rank_speeds, spent_seconds
from ultraep_serve.sidecar.statistics.selection import RecordSelection, decision_names
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot, RankView
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.telemetry.schema import RingHeader
from ultraep_serve.types import Decision, Stage

__all__ = ["BalanceCollector", "DetailCollector"]

_LABELS = ("phase", "decision", "reason")


class BalanceCollector(Collector):
    """Collects from ``store``."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Poll once and build every metric; without an engine only readiness and imbalance."""
        self._store.poll()
        unbalanced = bool(self._store.unbalanced())
        yield GaugeMetricFamily(
            "ultraep_unbalanced",
            "1 when the server could not be balanced and runs all the same; other metrics are then "
            "absent.",
            value=float(unbalanced),
        )
        if unbalanced:
            return
        ready = not self._store.problems()
        yield GaugeMetricFamily(
            "ultraep_ready",
            "1 when every rank of this host is alive and ready, else 0.",
            value=float(ready),
        )
        yield from _imbalances(self._store.timeline)
        try:
            header, views = self._store.header(), self._store.views()
        except NoRunError:
            return
        headers = [view.header for view in views if view.header]
        yield from _run_families(header)
        yield self._floor()
        yield from _total_families(headers)
        yield from _estimates(headers, self._store.timeline)
        yield from _rank_families(views)
        yield self._speeds()
        yield self._missed()

    def _floor(self) -> Metric:
        records = RecordSelection().considered(self._store.held().primary)
        return GaugeMetricFamily(
            "ultraep_imbalance_floor_ratio",
            "Lowest possible mean of ultraep_time_imbalance_ratio, as weights move only inside "
            "domains: the largest domain mean over the mean of all ranks, in the records that the "
            "sidecar holds.",
            value=mean_floor(records),
        )

    def _speeds(self) -> Metric:
        family = GaugeMetricFamily(
            "ultraep_rank_speed_ratio",
            "Speed of the rank that the newest batch was planned with; 1 is as fast as the fastest "
            "rank.",
            labels=["rank"],
        )
        for rank, speed in enumerate(rank_speeds(self._store.held().primary)):
            family.add_metric([str(rank)], speed)
        return family

    def _missed(self) -> Metric:
        family = CounterMetricFamily(
            "ultraep_records_missed",
            "Records overwritten or damaged before the sidecar read them.",
            labels=["rank"],
        )
        for rank, missed in self._store.missed().items():
            family.add_metric([str(rank)], missed)
        return family


def _imbalances(timeline: Timeline) -> Iterator[Metric]:
    by_count = HistogramMetricFamily(
        "ultraep_imbalance_ratio",
        "Max/mean of assignments over ranks, one observation per MoE layer of a batch that the "
        "policy considered; 1 is perfect. when=before: by routing alone; when=after: as computed.",
        labels=["phase", "when"],
    )
    by_time = HistogramMetricFamily(
        "ultraep_time_imbalance_ratio",
        "As ultraep_imbalance_ratio, of assignments over the speeds of ranks: what policy quota "
        "evens out; the same where ranks are equally fast.",
        labels=["phase", "when"],
    )
    for family, prefix in ((by_count, ""), (by_time, "time_")):
        for when in _WHEN:
            family.add_metric(["prefill", when], *timeline.histogram(prefix + when))
    yield from (by_count, by_time)


def _run_families(header: RingHeader) -> Iterator[Metric]:
    batches = CounterMetricFamily(
        "ultraep_batches", "Batches, by decision and reason.", labels=_LABELS
    )
    layers = CounterMetricFamily(
        "ultraep_layers", "MoE layers of batches, by decision and reason.", labels=_LABELS
    )
    for decision in Decision:
        labels = decision_names(decision)
        seen = header.recorded_batches[decision] + header.skipped_batches[decision]
        batches.add_metric(labels, seen)
        layers.add_metric(labels, header.layers[decision])
    yield batches
    yield layers
    yield CounterMetricFamily(
        "ultraep_replicas", "Replicas of experts placed, over all ranks.", value=header.replicas
    )
    yield InfoMetricFamily(
        "ultraep_policy",
        "The policy in force, the engine and how its ranks share the work.",
        value={"policy": header.policy.value, "engine": header.engine, "mode": header.mode},
    )


def _total_families(headers: list[RingHeader]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ultraep_moved_bytes",
        "Expert weights sent by the ranks of this host.",
        value=sum(header.bytes_sent for header in headers),
    )
    yield GaugeMetricFamily(
        "ultraep_slot_reserved_bytes",
        "Memory reserved for replica slots on this host.",
        value=sum(header.slot_bytes_reserved for header in headers),
    )
    family = CounterMetricFamily(
        "ultraep_stage_seconds",
        "Time in each stage of balancing and in the engine's part (compute), summed over ranks; "
        "exchange and wait are waiting times.",
        labels=["stage"],
    )
    for stage in Stage:
        total = sum(header.stage_ns[stage] for header in headers)
        family.add_metric([stage.name.lower()], total / 1e9)
    yield family


def _estimates(headers: list[RingHeader], timeline: Timeline) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ultraep_estimated_saved_seconds",
        "Estimated time that balancing avoided: the engine's time of each layer x (assignments of "
        "the busiest rank before / after - 1).",
        value=timeline.saved_seconds,
    )
    stages = float(spent_seconds([header.stage_ns for header in headers]))
    yield CounterMetricFamily(
        "ultraep_estimated_spent_seconds",
        "Estimated time that balancing took: its stages on the slowest rank, exchange on the rank "
        "that waited least, and the extra time of layers less balanced than before.",
        value=stages + timeline.worsened_seconds,
    )


def _rank_families(views: list[RankView]) -> Iterator[Metric]:
    labels = ["rank"]
    up = GaugeMetricFamily("ultraep_rank_up", "1 while the rank is alive.", labels=labels)
    heart = GaugeMetricFamily(
        "ultraep_heartbeat_age_seconds", "Time since the rank's last heartbeat.", labels=labels
    )
    batch = GaugeMetricFamily(
        "ultraep_last_batch_age_seconds",
        "Time since the rank's last batch; absent before the first.",
        labels=labels,
    )
    lost = CounterMetricFamily(
        "ultraep_records_lost", "Records that the rank could not write.", labels=labels
    )
    for view in views:
        rank, header = [str(view.rank)], view.header
        up.add_metric(rank, float(view.alive))
        if header is not None and view.heartbeat_age_seconds is not None:
            heart.add_metric(rank, view.heartbeat_age_seconds)
            lost.add_metric(rank, header.lost)
        if view.last_batch_age_seconds is not None:
            batch.add_metric(rank, view.last_batch_age_seconds)
    yield from (up, heart, batch, lost)


_WHEN = ("before", "after")


class DetailCollector(Collector):
    """Collects the metrics with many series from ``store``, which was just polled."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Build every metric; nothing without an engine."""
        try:
            views, snapshot = self._store.views(), self._store.snapshot(RecordSelection())
        except NoRunError:
            return
        yield from _window_families(snapshot)
        yield from _rank_counters(views)


def _window_families(snapshot: BalanceSnapshot) -> Iterator[Metric]:
    layers = GaugeMetricFamily(
        "ultraep_layer_imbalance_ratio",
        "Mean of max/mean of assignments over ranks in the records that the sidecar holds.",
        labels=["layer", "when"],
    )
    for layer in snapshot.layers:
        for when in _WHEN:
            mean = getattr(layer.imbalance, when).mean
            layers.add_metric([str(layer.layer), when], mean)
    ranks = GaugeMetricFamily(
        "ultraep_rank_assignments_ratio",
        "Assignments of the rank over the mean of all that share its layers, in the records that "
        "the sidecar holds.",
        labels=["rank", "when"],
    )
    for when in _WHEN:
        for rank in snapshot.ranks:
            ratio = getattr(rank.assignments, when) / (rank.assignments.mean or 1.0)
            ranks.add_metric([str(rank.rank), when], ratio)
    yield from (layers, ranks)


def _rank_counters(views: list[RankView]) -> Iterator[Metric]:
    sent = CounterMetricFamily("ultraep_rank_sent_bytes", "Expert weights sent.", labels=["rank"])
    received = CounterMetricFamily(
        "ultraep_rank_received_bytes", "Expert weights received.", labels=["rank"]
    )
    stages = CounterMetricFamily(
        "ultraep_rank_stage_seconds", "Time in each stage.", labels=["rank", "stage"]
    )
    for view in views:
        if view.header is None:
            continue
        rank = str(view.rank)
        sent.add_metric([rank], view.header.bytes_sent)
        received.add_metric([rank], view.header.bytes_received)
        for stage in Stage:
            stages.add_metric([rank, stage.name.lower()], view.header.stage_ns[stage] / 1e9)
    yield from (sent, received, stages)
