"""Second by second, what went on: what charts show, for longer than records are held."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.savings import avoided_seconds, spent_seconds
from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import imbalances
from ultraep_serve.types import Verb

__all__ = ["History", "Timeline"]

_SECOND_NS = 10**9


@dataclass
class _Second:
    """Sums over one second."""

    layers: int = 0
    batches: int = 0
    before_sum: float = 0.0
    before_max: float = 0.0
    after_sum: float = 0.0
    after_max: float = 0.0
    saved: float = 0.0
    worsened: float = 0.0
    verb_ns: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # by rank

    def add(self, records: RecordArray) -> None:
        """Count the lead's weighed ``records``."""
        before, after = imbalances(records["load_before"]), imbalances(records["load_after"])
        avoided = avoided_seconds(records)
        self.layers += len(records)
        self.batches += int((records["layer"] == 0).sum())
        self.before_sum += float(before.sum())
        self.after_sum += float(after.sum())
        self.before_max = max(self.before_max, float(before.max()))
        self.after_max = max(self.after_max, float(after.max()))
        self.saved += float(avoided[avoided > 0].sum())
        self.worsened -= float(avoided[avoided < 0].sum())

    @property
    def spent(self) -> float:
        return spent_seconds(np.array(list(self.verb_ns.values()))) + self.worsened


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
    """The largest of them."""
    after_mean: list[float | None]
    """Mean over layers and batches of max/mean of assignments over ranks, as computed."""
    after_max: list[float | None]
    """The largest of them."""
    batches: list[int]
    """Prefill batches."""
    saved_seconds: list[float]
    """Estimated time saved, as in the balance."""
    spent_seconds: list[float]
    """Estimated time spent, as in the balance."""
    schema_version: int = SCHEMA_VERSION


class Timeline:
    """One entry per second in which something happened, the newest ``max_seconds`` of them."""

    def __init__(self, max_seconds: int = 3600) -> None:
        self._max_seconds = max_seconds
        self._seconds: dict[int, _Second] = {}

    def add(self, records: RecordArray) -> None:
        """Count the lead's weighed ``records``, each of them once."""
        for second, part in self._by_second(records):
            second.add(part)

    def add_own(self, rank: int, records: RecordArray) -> None:
        """Count the times of ``rank``'s own ``records``, each of them once."""
        for second, part in self._by_second(records):
            spent = part["verb_ns"].sum(axis=0, dtype=np.float64)
            second.verb_ns[rank] = second.verb_ns.get(rank, np.zeros(len(Verb))) + spent

    def history(self, now_seconds: int, seconds: int, step: int) -> History:
        """The last ``seconds`` up to ``now_seconds`` (Unix time) in steps of ``step`` seconds."""
        begin = (now_seconds - seconds) // step * step + step
        times = list(range(begin, now_seconds + 1, step))
        steps = [self._merged(range(time, time + step)) for time in times]
        return History(
            step_seconds=step,
            time_seconds=times,
            before_mean=[s.before_sum / s.layers if s.layers else None for s in steps],
            before_max=[s.before_max if s.layers else None for s in steps],
            after_mean=[s.after_sum / s.layers if s.layers else None for s in steps],
            after_max=[s.after_max if s.layers else None for s in steps],
            batches=[s.batches for s in steps],
            saved_seconds=[s.saved for s in steps],
            spent_seconds=[s.spent for s in steps],
        )

    def _by_second(self, records: RecordArray) -> Iterator[tuple[_Second, RecordArray]]:
        times = records["time_ns"] // np.uint64(_SECOND_NS)
        for time in np.unique(times).tolist():
            if time not in self._seconds:
                self._seconds[time] = _Second()
                if len(self._seconds) > self._max_seconds:
                    del self._seconds[min(self._seconds)]
            if time in self._seconds:
                yield self._seconds[time], records[times == time]

    def _merged(self, times: range) -> _Second:
        total = _Second()
        for second in filter(None, map(self._seconds.get, times)):
            total.layers += second.layers
            total.batches += second.batches
            total.before_sum += second.before_sum
            total.after_sum += second.after_sum
            total.before_max = max(total.before_max, second.before_max)
            total.after_max = max(total.after_max, second.after_max)
            total.saved += second.saved
            total.worsened += second.worsened
            for rank, spent in second.verb_ns.items():
                total.verb_ns[rank] = total.verb_ns.get(rank, 0) + spent
        return total
