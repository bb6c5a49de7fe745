"""Prometheus metrics, built from the rings at every scrape.

Counters are those of the ranks, so nothing is lost between polls; they start at zero again with the
engine, as Prometheus expects of counters.

Phase is prefill or decode (batches below min_batch_tokens, which are not balanced and whose loads
are not counted). Decision is planned, forced or identity; reason is imbalanced, measuring, small,
policy_off, balanced, inconsistent or unprofitable. Metrics with many series come with
``/metrics?detail=true``.

Where ranks are on several hosts, each host's sidecar reports bytes, times and health of its own
ranks; imbalance, batches, layers and replicas cover all ranks and are the same on every host.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ultraep_serve.sidecar.statistics.fold import mean_floor, rank_speeds, spent_seconds
from ultraep_serve.sidecar.statistics.held import Held, NoRunError, RankView
from ultraep_serve.sidecar.statistics.proof import (
    failures,
    self_check_of,
    verification_of,
    verified_layers,
)
from ultraep_serve.sidecar.statistics.selection import RecordSelection, decision_names
from ultraep_serve.sidecar.statistics.snapshot import BalanceSnapshot
from ultraep_serve.sidecar.statistics.summary import summarise
from ultraep_serve.sidecar.statistics.timeline import Timeline
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, Stage, VerificationCheck

__all__ = ["StoreCollector"]

_WHEN = ("before", "after")
_Samples = Iterable[tuple[tuple[object, ...], float]]  # values of labels, and the value


class StoreCollector(Collector):
    """The metrics of one scrape; with ``detail`` also those with many series."""

    def __init__(self, store: RunStore, detail: bool) -> None:
        self._store, self._detail = store, detail

    def collect(self) -> Iterator[Metric]:
        """Poll once and build every metric; without an engine only readiness and imbalance."""
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
            "ready",
            "1 when every rank of this host is alive and ready, else 0.",
            not run.problems,
        )
        with self._store.timeline() as timeline:
            yield from list(_imbalances(timeline))
            saved, worsened = timeline.saved_seconds, timeline.worsened_seconds
        try:
            held = run.held()
        except NoRunError:
            return
        yield from _of_run(held)
        yield from _totals(held.headers)
        yield from _proof(held)
        yield from _estimates(held.headers, saved, worsened)
        yield from _of_ranks(held.views)
        if self._detail:
            yield from _detailed(held)


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


def _imbalances(timeline: Timeline) -> Iterator[Metric]:
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
        for when in _WHEN:
            family.add_metric(["prefill", when], *timeline.histogram(prefix + when))
        yield family


def _of_run(held: Held) -> Iterator[Metric]:
    header = held.header
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
    yield _counter("replicas", "Replicas of experts placed, over all ranks.", header.replicas)
    yield InfoMetricFamily(
        "ultraep_policy",
        "The policy in force, the engine and how its ranks share the work.",
        value={"policy": header.policy.value, "engine": header.engine, "mode": header.mode},
    )
    yield _gauge(
        "imbalance_floor_ratio",
        "Lowest possible mean of ultraep_time_imbalance_ratio, as weights move only inside "
        "domains: the largest domain mean over the mean of all ranks, in the records that the "
        "sidecar holds.",
        mean_floor(RecordSelection().considered(held.primary)),
    )
    yield _gauge(
        "rank_speed_ratio",
        "Speed of the rank that the newest batch was planned with; 1 is as fast as the fastest "
        "rank.",
        (((rank,), speed) for rank, speed in enumerate(rank_speeds(held.primary))),
        "rank",
    )


def _totals(headers: list[RingHeader]) -> Iterator[Metric]:
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
    totals = {stage: sum(header.stage_ns[stage] for header in headers) for stage in Stage}
    yield _counter(
        "stage_seconds",
        "Time in each stage of balancing and in the engine's part (compute), summed over ranks; "
        "exchange and wait are waiting times.",
        (((stage.name.lower(),), total / 1e9) for stage, total in totals.items()),
        "stage",
    )


def _proof(held: Held) -> Iterator[Metric]:
    headers, label = held.headers, "check"
    checked = self_check_of(headers)
    yield _gauge(
        "self_check_passed",
        "1 when the self-check at start has passed, 0 when it failed or checked nothing.",
        [] if checked.result is None else checked.result == "passed",
    )
    yield _gauge(
        "self_check_seconds",
        "Time that a check of the self-check at start took.",
        (((part.name,), part.seconds) for part in checked.checks),
        label,
    )
    for name, text, count in (
        ("verified_layers", "Layers of batches that were checked while serving.", verified_layers),
        (
            "verification_failures",
            "Checks of layers, on ranks of this host, that failed.",
            failures,
        ),
    ):
        yield _counter(
            name, text, [((c.name.lower(),), count(headers, c)) for c in VerificationCheck], label
        )
    found = verification_of(headers, is_off=bool(held.switched_off))
    yield _counter(
        "verification_seconds",
        "Time that checks of layers took, on the rank of this host that spent most.",
        found.seconds,
    )
    yield _gauge(
        "switched_off",
        "1 when a failed check has switched balancing off, until somebody sets a policy.",
        found.switched_off,
    )


def _estimates(headers: list[RingHeader], saved: float, worsened: float) -> Iterator[Metric]:
    yield _counter(
        "estimated_saved_seconds",
        "Estimated time that balancing avoided: the engine's time of each layer x (assignments of "
        "the busiest rank before / after - 1).",
        saved,
    )
    stages = float(spent_seconds([header.stage_ns for header in headers]))
    yield _counter(
        "estimated_spent_seconds",
        "Estimated time that balancing took: its stages on the slowest rank, exchange on the rank "
        "that waited least, and the extra time of layers less balanced than before.",
        stages + worsened,
    )


def _by_rank(sources: Iterable[tuple[int, Any]], name: str) -> _Samples:
    """The attribute ``name`` of every rank's source that has it."""
    values = ((rank, getattr(source, name)) for rank, source in sources)
    return [((rank,), value) for rank, value in values if value is not None]


def _of_ranks(views: Sequence[RankView]) -> Iterator[Metric]:
    ranks = [(view.health.rank, view.health) for view in views]
    yield _gauge("rank_up", "1 while the rank is alive.", _by_rank(ranks, "alive"), "rank")
    yield _gauge(
        "heartbeat_age_seconds",
        "Time since the rank's last heartbeat.",
        _by_rank(ranks, "heartbeat_age_seconds"),
        "rank",
    )
    yield _gauge(
        "last_batch_age_seconds",
        "Time since the rank's last batch; absent before the first.",
        _by_rank(ranks, "last_batch_age_seconds"),
        "rank",
    )
    yield _counter(
        "records_lost",
        "Records that the rank could not write.",
        _by_rank([(view.health.rank, view.header) for view in views if view.header], "lost"),
        "rank",
    )
    yield _counter(
        "records_missed",
        "Records overwritten or damaged before the sidecar read them.",
        _by_rank(ranks, "missed"),
        "rank",
    )


def _detailed(held: Held) -> Iterator[Metric]:
    """The metrics with many series."""
    yield from _of_window(summarise(held, RecordSelection()))
    headers = [(view.health.rank, view.header) for view in held.views if view.header]
    sent, received = _by_rank(headers, "bytes_sent"), _by_rank(headers, "bytes_received")
    yield _counter("rank_sent_bytes", "Expert weights sent.", sent, "rank")
    yield _counter("rank_received_bytes", "Expert weights received.", received, "rank")
    yield _counter(
        "rank_stage_seconds",
        "Time in each stage.",
        (
            ((rank, stage.name.lower()), header.stage_ns[stage] / 1e9)
            for rank, header in headers
            for stage in Stage
        ),
        "rank",
        "stage",
    )


def _of_window(snapshot: BalanceSnapshot) -> Iterator[Metric]:
    yield _gauge(
        "layer_imbalance_ratio",
        "Mean of max/mean of assignments over ranks in the records that the sidecar holds.",
        (
            ((layer.layer, when), getattr(layer.imbalance, when).mean)
            for layer in snapshot.layers
            for when in _WHEN
        ),
        "layer",
        "when",
    )
    yield _gauge(
        "rank_assignments_ratio",
        "Assignments of the rank over the mean of all that share its layers, in the records that "
        "the sidecar holds.",
        (
            ((rank.rank, when), getattr(rank.assignments, when) / (rank.assignments.mean or 1.0))
            for rank in snapshot.ranks
            for when in _WHEN
        ),
        "rank",
        "when",
    )
