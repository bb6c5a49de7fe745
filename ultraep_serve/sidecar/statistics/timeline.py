"""What all records add up to: since the sidecar started, and for every second of the last hour.

It takes fixed memory, and reaches further back than records are held. Percentiles come from
histograms, in which the excess over 1 is accurate to a tenth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.sidecar.statistics.fold import (
    IMBALANCES,
    batch_decisions,
    savings,
    spent_seconds,
    spread,
)
from ultraep_serve.sidecar.statistics.snapshot import (
    Document,
    ImbalanceSnapshot,
    Savings,
    Spread,
)
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Stage

__all__ = ["History", "Timeline", "Totals"]

_SECOND_NS = 10**9
_EMPTY = -1  # instead of a time
# Of the metrics: fine near 1, the goal of balancing, coarse where one rank does everything.
_BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)
# Upper bounds of the buckets here: those, and the excess over 1 in steps of a fifth.
_FINE: NDArray[np.float64] = np.union1d(_BOUNDS, 1 + 1e-3 * 1.2 ** np.arange(67))
_MIDDLES = np.concatenate([[1.0], (_FINE[:-1] + _FINE[1:]) / 2, _FINE[-1:]])


def _sums_dtype(count: str) -> np.dtype[np.void]:
    """Sums of some records, with counts of type ``count``."""
    imbalance: Any = [("sum", "<f8"), ("max", "<f8"), ("counts", count, (len(_FINE) + 1,))]
    return np.dtype(
        [
            ("time", "<i8"),  # Unix time
            ("layers", "<i8"),
            ("batches", count, (len(Decision),)),  # with records
            *((name, imbalance) for name in IMBALANCES),
            ("saved", "<f8"),
            ("worsened", "<f8"),  # of layers whose busiest rank got more
            ("bytes_sent", "<f8"),  # by all ranks
        ]
    )


class History(Document):
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


@dataclass(frozen=True)
class Totals:
    """The sums over some seconds."""

    imbalance: ImbalanceSnapshot
    batches: dict[Decision, int]  # with records
    bytes_sent: int
    savings: Savings


class Timeline:
    """The newest ``max_seconds`` seconds, of which second t is at index ``t % max_seconds``."""

    def __init__(self, max_seconds: int = 3600) -> None:
        self._size = max_seconds
        # The last one is always empty: it stands for all that are not held.
        self._seconds = np.zeros(max_seconds + 1, _sums_dtype("<i4"))
        self._seconds["time"] = _EMPTY
        self._stage_ns = np.zeros((max_seconds + 1, 0, len(Stage)), np.float32)  # by rank
        self._ever = np.zeros(1, _sums_dtype("<i8"))
        self._last_batch = (-1, int(Decision.PLANNED), 0)  # number, decision and second

    @property
    def saved_seconds(self) -> float:
        """Estimated time that balancing avoided since the start."""
        return float(self._ever["saved"][0])

    @property
    def worsened_seconds(self) -> float:
        """Estimated extra time, since the start, of layers whose busiest rank got more."""
        return float(self._ever["worsened"][0])

    def histogram(self, name: str) -> tuple[list[tuple[str, float]], float]:
        """Buckets in the format of Prometheus, and the sum, of imbalance ``name`` since the start.

        A bucket is its upper bound and how many values are at most that.
        """
        sums = self._ever[name][0]
        reached = np.cumsum(sums["counts"])
        totals = [*reached[np.searchsorted(_FINE, _BOUNDS)].tolist(), int(reached[-1])]
        bounds = [*map(str, _BOUNDS), "+Inf"]
        return list(zip(bounds, map(float, totals), strict=True)), float(sums["sum"])

    def add(self, records: RecordArray) -> None:
        """Count ``records``, with figures, that the policy considered, each once."""
        if len(records):
            _add(self._ever[0], records)
        for index, part in self._by_second(records):
            _add(self._seconds[index], part)

    def add_batches(self, records: RecordArray, *, of_new_run: bool = False) -> None:
        """Count the batches of the primary rank's ``records``; one may continue in the next call.

        ``of_new_run``: none continues one of the last call.
        """
        if of_new_run:
            self._last_batch = (-1, int(Decision.PLANNED), 0)
        numbers, decisions, times_ns = batch_decisions(records)
        for number, decision, time_ns in zip(
            numbers.tolist(), decisions.tolist(), times_ns.tolist(), strict=True
        ):
            known, counted_as, second = self._last_batch
            if number != known:
                second = time_ns // _SECOND_NS
                self._count_batch(decision, second, 1)
            elif decision == Decision.PLANNED != counted_as:
                self._count_batch(counted_as, second, -1)
                self._count_batch(decision, second, 1)
            else:
                decision = counted_as
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
        rows = self._rows(steps[:, None] + np.arange(step))
        layers, saved, worsened = (
            self._seconds[name][rows].sum(axis=1) for name in ("layers", "saved", "worsened")
        )
        spent = spent_seconds(self._stage_ns[rows].sum(axis=1, dtype=np.float64))

        def where_known(values: NDArray[np.float64]) -> list[float | None]:
            return [v if n else None for v, n in zip(values.tolist(), layers, strict=True)]

        def means(name: str) -> list[float | None]:
            sums = self._seconds[name]["sum"][rows].sum(axis=1)
            return where_known(sums / np.maximum(layers, 1))

        def maxima(name: str) -> list[float | None]:
            return where_known(self._seconds[name]["max"][rows].max(axis=1))

        return History(
            step_seconds=step,
            time_seconds=steps.tolist(),
            before_mean=means("before"),
            before_max=maxima("before"),
            after_mean=means("after"),
            after_max=maxima("after"),
            time_after_mean=means("time_after"),
            batches=self._seconds["batches"].sum(axis=1)[rows].sum(axis=1).tolist(),
            saved_seconds=saved.tolist(),
            spent_seconds=(spent + worsened).tolist(),
        )

    def totals(self, now_seconds: int, seconds: int) -> Totals:
        """The sums over the last ``seconds`` up to and including ``now_seconds`` (Unix time)."""
        rows = np.unique(self._rows(np.arange(now_seconds - seconds + 1, now_seconds + 1)))
        found = self._seconds[rows]
        counts = found["batches"].sum(axis=0).tolist()
        stage_ns = self._stage_ns[rows].sum(axis=0, dtype=np.float64)
        saved, worsened = (float(found[name].sum()) for name in ("saved", "worsened"))
        return Totals(
            imbalance=ImbalanceSnapshot(
                before=_spread(found["before"]), after=_spread(found["after"])
            ),
            batches=dict(zip(Decision, counts, strict=True)),
            bytes_sent=int(found["bytes_sent"].sum()),
            savings=savings(saved, worsened, stage_ns),
        )

    def _rows(self, times: NDArray[np.signedinteger]) -> NDArray[np.signedinteger]:
        """Where the seconds ``times`` (...,) are held."""
        rows = times % self._size
        return np.where(self._seconds["time"][rows] == times, rows, self._size)

    def _by_second(self, records: RecordArray) -> Iterator[tuple[int, RecordArray]]:
        """Indices of seconds and their ``records``, without those too old to be held."""
        times = records["time_ns"] // _SECOND_NS
        for time in np.unique(times).tolist():
            if (index := self._index(time)) is not None:
                yield index, records[times == time]

    def _index(self, time: int) -> int | None:
        """Where second ``time`` is held, made empty if it is new; None if it is too old."""
        index = time % self._size
        held = int(self._seconds[index]["time"])
        if held < time:
            self._seconds[index] = np.zeros((), self._seconds.dtype)
            self._seconds[index]["time"] = time
            self._stage_ns[index] = 0
        return index if held <= time else None

    def _count_batch(self, decision: int, second: int, number: int) -> None:
        index = self._index(second)
        if index is not None:
            self._seconds[index]["batches"][decision] += number


def _add(sums: np.void, records: RecordArray) -> None:
    """Fold ``records`` with figures into ``sums``."""
    avoided = records["avoided"]
    sums["layers"] += len(records)
    sums["saved"] += avoided[avoided > 0].sum()
    sums["worsened"] -= avoided[avoided < 0].sum()
    for name in IMBALANCES:
        own, values = sums[name], records[name]
        own["sum"] += values.sum()
        own["max"] = max(own["max"], values.max())
        own["counts"] += np.bincount(np.searchsorted(_FINE, values), minlength=len(_FINE) + 1)


def _spread(found: NDArray[np.void]) -> Spread:
    """The spread of one imbalance over the seconds ``found`` (n,)."""
    counts = found["counts"].sum(axis=0, dtype=np.int64)
    if not counts.any():
        return spread(np.empty(0))
    worst = float(found["max"].max())
    mean = float(found["sum"].sum()) / int(counts.sum())
    middles = spread(np.minimum(_MIDDLES, worst), counts)
    return middles.model_copy(update={"mean": mean, "max": worst})
