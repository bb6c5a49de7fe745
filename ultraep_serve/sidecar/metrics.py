"""Prometheus families, built from the rings when they are asked for.

Counters are the writers' own, so nothing is lost between polls; they start again at zero with the
engine, which Prometheus expects of a counter.
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

from ultraep_serve.observability import RankView, RingHeader
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.types import Decision, Verb

__all__ = ["BalanceCollector"]


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
        yield GaugeMetricFamily("ultraep_ready", "1 when every rank is ready.", value=float(ready))
        yield self._imbalance()
        try:
            header, views = self._store.header(), self._store.views()
        except NoRunError:
            return
        yield from _run_families(header)
        yield _verb_seconds(views)
        yield from _rank_families(views)
        yield self._missed()

    def _imbalance(self) -> Metric:
        family = HistogramMetricFamily(
            "ultraep_imbalance_ratio",
            "Max/mean of assignments over ranks, per weighed layer and batch.",
            labels=["stage"],
        )
        for stage in ("before", "after"):
            histogram = self._store.histogram
            family.add_metric([stage], histogram.buckets(stage), histogram.sum(stage))
        return family

    def _missed(self) -> Metric:
        family = CounterMetricFamily(
            "ultraep_records_missed", "Records gone before the sidecar read them.", labels=["rank"]
        )
        for rank, missed in self._store.missed().items():
            family.add_metric([str(rank)], missed)
        return family


def _run_families(header: RingHeader) -> Iterator[Metric]:
    batches = CounterMetricFamily("ultraep_batches", "Batches seen.", labels=["decision"])
    layers = CounterMetricFamily("ultraep_layers", "MoE layers seen.", labels=["decision"])
    for decision in Decision:
        name = decision.name.lower()
        seen = header.recorded_batches[decision] + header.skipped_batches[decision]
        batches.add_metric([name], seen)
        layers.add_metric([name], header.layers[decision])
    yield batches
    yield layers
    yield CounterMetricFamily("ultraep_replicas", "Replicas placed.", value=header.replicas)
    yield InfoMetricFamily(
        "ultraep_policy",
        "The policy in force and the engine it serves.",
        value={"policy": header.policy.value, "engine": header.engine, "mode": header.mode},
    )


def _verb_seconds(views: list[RankView]) -> Metric:
    family = CounterMetricFamily(
        "ultraep_verb_seconds", "Time spent per verb, summed over ranks.", labels=["verb"]
    )
    for verb in Verb:
        total = sum(view.header.verb_ns[verb] for view in views if view.header)
        family.add_metric([verb.name.lower()], total / 1e9)
    return family


def _rank_families(views: list[RankView]) -> Iterator[Metric]:
    labels = ["rank"]
    up = GaugeMetricFamily("ultraep_rank_up", "1 while the rank's heart beats.", labels=labels)
    age = GaugeMetricFamily(
        "ultraep_heartbeat_age_seconds", "Time since the rank's last heartbeat.", labels=labels
    )
    sent = CounterMetricFamily("ultraep_sent_bytes", "Weights sent.", labels=labels)
    received = CounterMetricFamily("ultraep_received_bytes", "Weights received.", labels=labels)
    lost = CounterMetricFamily(
        "ultraep_records_lost", "Records that the rank could not write.", labels=labels
    )
    slots = GaugeMetricFamily(
        "ultraep_slot_reserved_bytes", "Memory reserved for replica slots.", labels=labels
    )
    for view in views:
        rank, header = [str(view.rank)], view.header
        up.add_metric(rank, float(view.alive))
        if header is not None and view.heartbeat_age_seconds is not None:
            age.add_metric(rank, view.heartbeat_age_seconds)
            sent.add_metric(rank, header.bytes_sent)
            received.add_metric(rank, header.bytes_received)
            lost.add_metric(rank, header.lost)
            slots.add_metric(rank, header.slot_bytes_reserved)
    yield from (up, age, sent, received, lost, slots)
