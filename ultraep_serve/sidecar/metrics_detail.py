"""Prometheus families of many series, only for scrapers that ask with ``?detail=true``.

ultraep_layer_imbalance_ratio (layer, stage), ultraep_rank_assignments_ratio (rank, stage),
ultraep_rank_sent_bytes_total (rank), ultraep_rank_received_bytes_total (rank),
ultraep_rank_verb_seconds_total (rank, verb).
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ultraep_serve.observability import BalanceSnapshot, RankView, Window
from ultraep_serve.sidecar.store import NoRunError, RunStore
from ultraep_serve.types import Verb

__all__ = ["DetailCollector"]

_STAGES = ("before", "after")


class DetailCollector(Collector):
    """Collects from ``store``, which another collector has just polled."""

    def __init__(self, store: RunStore) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not read the run directory."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Build every family; nothing without an engine."""
        try:
            views, snapshot = self._store.views(), self._store.snapshot(Window())
        except NoRunError:
            return
        yield from _window_families(snapshot)
        yield from _rank_counters(views)


def _window_families(snapshot: BalanceSnapshot) -> Iterator[Metric]:
    layers = GaugeMetricFamily(
        "ultraep_layer_imbalance_ratio",
        "Mean of max/mean of assignments over ranks in the records that the sidecar holds.",
        labels=["layer", "stage"],
    )
    for layer in snapshot.layers:
        for stage in _STAGES:
            mean = getattr(layer.imbalance, stage).mean
            layers.add_metric([str(layer.layer), stage], mean)
    ranks = GaugeMetricFamily(
        "ultraep_rank_assignments_ratio",
        "Assignments of the rank over the mean of all, in the records that the sidecar holds.",
        labels=["rank", "stage"],
    )
    for stage in _STAGES:
        mean = snapshot.assignments / snapshot.num_ranks or 1.0
        for rank in snapshot.ranks:
            ranks.add_metric([str(rank.rank), stage], getattr(rank.assignments, stage) / mean)
    yield from (layers, ranks)


def _rank_counters(views: list[RankView]) -> Iterator[Metric]:
    sent = CounterMetricFamily("ultraep_rank_sent_bytes", "Weights sent.", labels=["rank"])
    received = CounterMetricFamily(
        "ultraep_rank_received_bytes", "Weights received.", labels=["rank"]
    )
    verbs = CounterMetricFamily(
        "ultraep_rank_verb_seconds", "Time in each verb.", labels=["rank", "verb"]
    )
    for view in views:
        if view.header is None:
            continue
        rank = str(view.rank)
        sent.add_metric([rank], view.header.bytes_sent)
        received.add_metric([rank], view.header.bytes_received)
        for verb in Verb:
            verbs.add_metric([rank, verb.name.lower()], view.header.verb_ns[verb] / 1e9)
    yield from (sent, received, verbs)
