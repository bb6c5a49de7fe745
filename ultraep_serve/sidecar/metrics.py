"""Prometheus families, built from the rings when they are asked for.

Counters are the writers' own, so nothing is lost between polls; they start again at zero with the
engine, which Prometheus expects of a counter. Families and their labels:

======================================  ====================================================
ultraep_ready                           1 when every rank of this host is alive and ready
ultraep_policy_info                     policy, engine, mode: labels, value 1
ultraep_imbalance_ratio                 histogram by phase and stage (before, after)
ultraep_imbalance_floor_ratio           the least that ultraep_imbalance_ratio can become
ultraep_batches_total                   by phase, decision and reason
ultraep_layers_total                    by phase, decision and reason
ultraep_replicas_total                  replicas placed
ultraep_moved_bytes_total               weights sent by the ranks of this host
ultraep_verb_seconds_total              by verb, summed over the ranks of this host
ultraep_estimated_saved_seconds_total   time that evening out the busiest rank avoided
ultraep_estimated_spent_seconds_total   time that balancing took
ultraep_rank_up                         by rank
ultraep_heartbeat_age_seconds           by rank
ultraep_last_batch_age_seconds          by rank
ultraep_records_lost_total              by rank: could not be written
ultraep_records_missed_total            by rank: gone before the sidecar read them
ultraep_slot_reserved_bytes             memory of replica slots on this host
======================================  ====================================================

Phase is prefill or decode (batches below min_batch_tokens, which are left alone and whose loads
are not counted). Decision is planned, forced or identity; reason says why: imbalanced, measuring,
small, policy_off, balanced, doubt, unprofitable. Series per layer, and more per rank, come only
with ``/metrics?detail=true``: see ``metrics_detail``.

Where ranks are on several hosts, each host's sidecar counts bytes, times and the health of its own
ranks; imbalance, batches, layers and replicas are those of all ranks, the same on every host.
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

from ultraep_serve.observability import RankView, RingHeader, Window
from ultraep_serve.observability.outcomes import outcome
from ultraep_serve.observability.savings import spent_seconds
from ultraep_serve.observability.snapshot import mean_floor
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.sidecar.tally import Tally
from ultraep_serve.types import Decision, Verb

__all__ = ["BalanceCollector"]

_LABELS = ("phase", "decision", "reason")


class BalanceCollector(Collector):
    """Collects from ``store``; register it with a registry of your own."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Poll once and build every family; without an engine only readiness is left."""
        self._store.poll()
        ready = not self._store.problems()
        yield GaugeMetricFamily(
            "ultraep_ready",
            "1 when every rank of this host is alive and ready, else 0.",
            value=float(ready),
        )
        yield _imbalance(self._store.tally)
        try:
            header, views = self._store.header(), self._store.views()
        except NoRunError:
            return
        headers = [view.header for view in views if view.header]
        yield from _run_families(header)
        yield self._floor(header)
        yield from _total_families(headers)
        yield from _estimates(headers, self._store.tally)
        yield from _rank_families(views)
        yield self._missed()

    def _floor(self, header: RingHeader) -> Metric:
        loads = Window().weighed(self._store.held().lead)["load_before"]
        return GaugeMetricFamily(
            "ultraep_imbalance_floor_ratio",
            "The least that the mean of ultraep_imbalance_ratio can become where weights move only "
            "inside domains: the largest domain mean over the mean of all ranks, in the records "
            "that the sidecar holds.",
            value=mean_floor(loads, header.location.domain_size),
        )

    def _missed(self) -> Metric:
        family = CounterMetricFamily(
            "ultraep_records_missed",
            "Records overwritten or damaged before the sidecar read them.",
            labels=["rank"],
        )
        for rank, missed in self._store.missed().items():
            family.add_metric([str(rank)], missed)
        return family


def _imbalance(tally: Tally) -> Metric:
    family = HistogramMetricFamily(
        "ultraep_imbalance_ratio",
        "Max/mean of assignments over ranks, one observation per weighed MoE layer of a batch; "
        "1 is perfect. Stage before: by routing alone; after: as computed.",
        labels=["phase", "stage"],
    )
    for stage, histogram in (("before", tally.before), ("after", tally.after)):
        family.add_metric(["prefill", stage], histogram.buckets(), histogram.sum)
    return family


def _run_families(header: RingHeader) -> Iterator[Metric]:
    batches = CounterMetricFamily(
        "ultraep_batches", "Batches, by what was decided and why.", labels=_LABELS
    )
    layers = CounterMetricFamily(
        "ultraep_layers", "MoE layers of batches, by what was decided and why.", labels=_LABELS
    )
    for decision in Decision:
        labels = outcome(decision)
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
        "The policy in force and the engine it serves.",
        value={"policy": header.policy.value, "engine": header.engine, "mode": header.mode},
    )


def _total_families(headers: list[RingHeader]) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ultraep_moved_bytes",
        "Expert weights sent, by the ranks of this host.",
        value=sum(header.bytes_sent for header in headers),
    )
    yield GaugeMetricFamily(
        "ultraep_slot_reserved_bytes",
        "Memory reserved for replica slots, on this host.",
        value=sum(header.slot_bytes_reserved for header in headers),
    )
    family = CounterMetricFamily(
        "ultraep_verb_seconds",
        "Time in each verb of balancing, and in the engine's part (compute), summed over ranks; "
        "await and exchange are waiting times.",
        labels=["verb"],
    )
    for verb in Verb:
        total = sum(header.verb_ns[verb] for header in headers)
        family.add_metric([verb.name.lower()], total / 1e9)
    yield family


def _estimates(headers: list[RingHeader], tally: Tally) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "ultraep_estimated_saved_seconds",
        "Estimated time that evening out the busiest rank avoided: the engine's time of each "
        "layer x (the busiest rank's assignments before / after - 1).",
        value=tally.saved_seconds,
    )
    verbs = float(spent_seconds([header.verb_ns for header in headers]))
    yield CounterMetricFamily(
        "ultraep_estimated_spent_seconds",
        "Estimated time that balancing took: its verbs on the busiest rank, exchange on the rank "
        "that waited least, and what layers took longer that were left less even than before.",
        value=verbs + tally.worsened_seconds,
    )


def _rank_families(views: list[RankView]) -> Iterator[Metric]:
    labels = ["rank"]
    up = GaugeMetricFamily("ultraep_rank_up", "1 while the rank's heart beats.", labels=labels)
    heart = GaugeMetricFamily(
        "ultraep_heartbeat_age_seconds", "Time since the rank's last heartbeat.", labels=labels
    )
    batch = GaugeMetricFamily(
        "ultraep_last_batch_age_seconds",
        "Time since the rank's last batch, absent before any.",
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
