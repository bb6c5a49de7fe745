"""Sums for every second, in fixed memory and for longer than records are held."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.sidecar.statistics.figures import (
    avoided_seconds,
    imbalances,
    spent_seconds,
    time_imbalances,
)
from ultraep_serve.sidecar.statistics.snapshot import (
    SCHEMA_VERSION,
    Documented,
    ImbalanceSnapshot,
    Savings,
    Spread,
)
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Stage

__all__ = ["History", "Timeline", "Totals"]

_SECOND_NS = 10**9
_EMPTY = -1  # instead of a time
# The excess over 1 in steps of a tenth: percentiles are accurate to that.
FINE_BOUNDS: NDArray[np.float64] = 1 + np.concatenate([[0.0], 1e-3 * 1.1 ** np.arange(127)])
_IMBALANCE = [("sum", "<f8"), ("max", "<f8"), ("counts", "<i4", (len(FINE_BOUNDS) + 1,))]
_SECOND_DTYPE = np.dtype(
    [
        ("time", "<i8"),  # Unix time
        ("layers", "<i8"),
        ("batches", "<i4", (len(Decision),)),  # with records
        ("before", _IMBALANCE),
        ("after", _IMBALANCE),
        ("time_after", "<f8"),  # sum of time imbalances
        ("saved", "<f8"),
        ("worsened", "<f8"),
        ("bytes_sent", "<f8"),  # by all ranks
    ]
)


@dataclass(frozen=True)
class History(Documented):
    """Figures over time, one entry per step; null or 0 where there was no prefill."""

    step_seconds: int
    """Seconds per entry."""
    time_seconds: list[int]
    """Unix time at which each step begins."""
    before_mean: list[float | None]
    """Mean over layers and batches of max/mean of assignments over ranks, by routing alone."""
    before_max: list[float | None]
    """The maximum of the same."""
    after_mean: list[float | None]
    """Mean over layers and batches of max/mean of assignments over ranks, as computed."""
    after_max: list[float | None]
    """The maximum of the same."""
    time_after_mean: list[float | None]
    """Mean of the time imbalance, of assignments over speeds, as computed."""
    batches: list[int]
    """Prefill batches."""
    saved_seconds: list[float]
    """Estimated time saved, as in the balance."""
    spent_seconds: list[float]
    """Estimated time spent, as in the balance."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Totals:
    """The sums over some seconds."""

    imbalance: ImbalanceSnapshot
    batches: dict[Decision, int]  # with records
    bytes_sent: int
    savings: Savings


class Timeline:
    """The newest ``max_seconds`` seconds; second t is at index ``t % max_seconds``."""

    def __init__(self, max_seconds: int = 3600) -> None:
        self._seconds = np.zeros(max_seconds, _SECOND_DTYPE)
        self._seconds["time"] = _EMPTY
        self._stage_ns = np.zeros((max_seconds, 0, len(Stage)), np.float32)  # by rank
        self._last_batch = (-1, Decision.PLANNED, 0)  # number, decision and second

    def add(self, records: RecordArray) -> None:
        """Count ``records`` of the primary rank that the policy considered, each once."""
        for index, part in self._by_second(records):
            second, avoided = self._seconds[index], avoided_seconds(part)
            second["layers"] += len(part)
            second["saved"] += avoided[avoided > 0].sum()
            second["worsened"] -= avoided[avoided < 0].sum()
            second["time_after"] += time_imbalances(part["load_after"], part["speed"]).sum()
            for name in ("before", "after"):
                sums, values = second[name], imbalances(part[f"load_{name}"])
                sums["sum"] += values.sum()
                sums["max"] = max(sums["max"], values.max())
                buckets = np.searchsorted(FINE_BOUNDS, values)
                counts = np.bincount(buckets, minlength=len(FINE_BOUNDS) + 1)
                sums["counts"] += counts.astype(np.int32)

    def add_batches(self, records: RecordArray) -> None:
        """Count the batches of the primary rank's ``records``; one may continue in the next call.

        As in ``count_batches``, a batch is planned if any layer was, else as its first layer.
        """
        numbers, first = np.unique(records["batch"], return_index=True)
        planned = set(records["batch"][records["decision"] == Decision.PLANNED].tolist())
        codes, times = records["decision"][first], records["time_ns"][first] // _SECOND_NS
        for number, code, time in zip(
            numbers.tolist(), codes.tolist(), times.tolist(), strict=True
        ):
            known, decision, second = self._last_batch
            if number != known:
                decision, second = Decision(code), time
                self._count_batch(decision, second, 1)
            if number in planned and decision is not Decision.PLANNED:
                self._count_batch(decision, second, -1)
                decision = Decision.PLANNED
                self._count_batch(decision, second, 1)
            self._last_batch = (number, decision, second)

    def add_own(self, rank: int, records: RecordArray) -> None:
        """Count times and bytes of ``rank``'s own ``records``, each once."""
        missing = rank + 1 - self._stage_ns.shape[1]
        if missing > 0:
            self._stage_ns = np.pad(self._stage_ns, ((0, 0), (0, missing), (0, 0)))
        for index, part in self._by_second(records):
            self._stage_ns[index, rank] += part["stage_ns"].sum(axis=0, dtype=np.float64)
            self._seconds[index]["bytes_sent"] += part["bytes_sent"].sum()

    def history(self, now_seconds: int, seconds: int, step: int) -> History:
        """The last ``seconds`` up to ``now_seconds`` (Unix time) in steps of ``step`` seconds."""
        begin = (now_seconds - seconds) // step * step + step
        steps = np.arange(begin, now_seconds + 1, step)
        found, stage_ns = self._found(steps[:, None] + np.arange(step))
        layers = found["layers"].sum(axis=1)

        def known(values: NDArray[np.float64]) -> list[float | None]:
            return [v if n else None for v, n in zip(values.tolist(), layers, strict=True)]

        def means(when: str) -> list[float | None]:
            return known(found[when]["sum"].sum(axis=1) / np.maximum(layers, 1))

        def most(when: str) -> list[float | None]:
            return known(found[when]["max"].max(axis=1))

        spent = spent_seconds(stage_ns.sum(axis=1, dtype=np.float64))
        return History(
            step_seconds=step,
            time_seconds=steps.tolist(),
            before_mean=means("before"),
            before_max=most("before"),
            after_mean=means("after"),
            after_max=most("after"),
            time_after_mean=known(found["time_after"].sum(axis=1) / np.maximum(layers, 1)),
            batches=found["batches"].sum(axis=(1, 2)).tolist(),
            saved_seconds=found["saved"].sum(axis=1).tolist(),
            spent_seconds=(spent + found["worsened"].sum(axis=1)).tolist(),
        )

    def totals(self, now_seconds: int, seconds: int) -> Totals:
        """The sums over the last ``seconds`` up to and including ``now_seconds`` (Unix time)."""
        found, stage_ns = self._found(np.arange(now_seconds - seconds + 1, now_seconds + 1))
        counts = found["batches"].sum(axis=0).tolist()
        saved = float(found["saved"].sum())
        spent = float(spent_seconds(stage_ns.sum(axis=0, dtype=np.float64)))
        spent += float(found["worsened"].sum())
        return Totals(
            imbalance=ImbalanceSnapshot(_spread(found, "before"), _spread(found, "after")),
            batches=dict(zip(Decision, counts, strict=True)),
            bytes_sent=int(found["bytes_sent"].sum()),
            savings=Savings(saved, spent, saved - spent),
        )

    def _found(
        self, times: NDArray[np.signedinteger]
    ) -> tuple[NDArray[np.void], NDArray[np.float32]]:
        """The seconds ``times`` (...,) and the time in each stage by rank, zeros where unknown."""
        indices = times % len(self._seconds)
        found, stage_ns = self._seconds[indices], self._stage_ns[indices]
        unknown = found["time"] != times
        found[unknown], stage_ns[unknown] = np.zeros((), _SECOND_DTYPE), 0
        return found, stage_ns

    def _by_second(self, records: RecordArray) -> Iterator[tuple[int, RecordArray]]:
        """Indices of seconds and their ``records``, without those too old to be held."""
        times = records["time_ns"] // _SECOND_NS
        for time in np.unique(times).tolist():
            index = self._index(time)
            if index is not None:
                yield index, records[times == time]

    def _index(self, time: int) -> int | None:
        """Where second ``time`` is held, made empty if it is new; None if it is too old."""
        index = time % len(self._seconds)
        held = int(self._seconds[index]["time"])
        if held < time:
            self._seconds[index] = np.zeros((), _SECOND_DTYPE)
            self._seconds[index]["time"] = time
            self._stage_ns[index] = 0
        return index if held <= time else None

    def _count_batch(self, decision: Decision, second: int, number: int) -> None:
        index = self._index(second)
        if index is not None:
            self._seconds[index]["batches"][decision] += number


def _spread(found: NDArray[np.void], when: str) -> Spread:
    """The spread of imbalance ``when`` (before or after) over the seconds ``found`` (n,)."""
    layers = int(found["layers"].sum())
    if not layers:
        return Spread(None, None, None, None)
    counts, worst = found[when]["counts"].sum(axis=0), float(found[when]["max"].max())
    p50, p99 = (min(worst, percentile(counts, part)) for part in (0.5, 0.99))
    return Spread(float(found[when]["sum"].sum()) / layers, p50, p99, worst)


def percentile(counts: NDArray[np.integer], part: float) -> float:
    """The value below which ``part`` of ``counts`` (len(FINE_BOUNDS) + 1,) lies, interpolated."""
    reached: NDArray[np.int64] = np.cumsum(counts)
    bucket = int(np.searchsorted(reached, part * reached[-1]))
    if bucket == 0 or bucket == len(FINE_BOUNDS):
        return float(FINE_BOUNDS[max(0, bucket - 1)])
    inside = (part * reached[-1] - reached[bucket - 1]) / counts[bucket]
    low, high = FINE_BOUNDS[bucket - 1 : bucket + 1]
    return float(low + inside * (high - low))
