"""The one way in which records become figures: per record, over many, and in histograms.

Imbalance is max/mean of assignments over ranks, per layer and batch. All ranks hold the same loads,
so it is computed from the primary rank's records; bytes and times come from each rank's own. Time
imbalance is the same fold with the speeds of ranks as weights: the busiest rank's time over what it
would be if all ended together. Where ranks are equally fast both are the same.

Savings: a layer is finished when its busiest rank is, so the engine's part of a layer (stage
``compute``: dispatch, expert kernel, combine) took as long as the busiest rank needed for its
assignments. Without balancing it would have taken longer in proportion to the busiest rank's
time by routing alone. This overstates the savings where a part of the engine's time does not
depend on the load.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.sidecar.statistics.snapshot import ImbalanceSnapshot, Savings, Spread
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Stage

__all__ = [
    "IMBALANCES",
    "BatchDecisions",
    "batch_decisions",
    "count_batches",
    "imbalance_snapshot",
    "imbalances",
    "mean_floor",
    "parts_by",
    "rank_speeds",
    "savings",
    "spent_seconds",
    "spread",
    "stage_seconds",
    "with_figures",
]

IMBALANCES = ("before", "after", "time_before", "time_after")  # figures of every record
_FIGURES = [*IMBALANCES, "floor", "avoided"]
_NOT_KEPT = ("seq", "crc", "reserved", "padding")  # fields of a ring's records
_OWN = [Stage.COUNT, Stage.PLAN, Stage.REPLICATE, Stage.REROUTE, Stage.WAIT]


def with_figures(records: RecordArray, domain_size: int) -> RecordArray:
    """A copy of a ring's ``records`` (n,) in which each has its figures, computed this once.

    ``before`` and ``after`` are imbalances, ``time_before`` and ``time_after`` time imbalances,
    ``floor`` is the lowest time imbalance that copies inside domains can reach, ``avoided`` the
    estimated seconds that balancing took off (negative where the busiest rank got more).
    """
    result = np.empty(len(records), _dtype_with_figures(records.dtype))
    for name in set(records.dtype.names or ()).difference(_NOT_KEPT):
        result[name] = records[name]
    speeds = records["speed"]
    for when in ("before", "after"):
        loads = records[f"load_{when}"]
        result[when], result[f"time_{when}"] = imbalances(loads), imbalances(loads, speeds)
    result["floor"] = 1.0
    if domain_size < speeds.shape[1]:
        domains = speeds.shape[1] // domain_size, domain_size
        by_domain = (
            values.reshape(len(records), *domains).sum(axis=2, dtype=np.int64)
            for values in (records["load_before"], speeds)
        )
        result["floor"] = imbalances(*by_domain)
    seconds = records["stage_ns"][:, Stage.COMPUTE] / 1e9
    result["avoided"] = seconds * (result["time_before"] / result["time_after"] - 1)
    return result


@lru_cache(maxsize=8)
def _dtype_with_figures(dtype: np.dtype[np.void]) -> np.dtype[np.void]:
    kept: list[Any] = [field for field in dtype.descr if field[0] not in _NOT_KEPT]
    return np.dtype([*kept, *((name, "<f8") for name in _FIGURES)], align=True)


def imbalances(
    loads: NDArray[np.integer], speeds: NDArray[np.integer] | None = None
) -> NDArray[np.float64]:
    """Max/mean over ranks of each row of ``loads`` (n, R) over that of ``speeds`` (n, R).

    Without ``speeds`` all ranks are equally fast; 1.0 for an empty row.
    """
    if speeds is None:
        speeds = np.ones((1, loads.shape[1]), np.int64)
    speeds = np.maximum(speeds, 1)  # 0 in a ring that somebody else wrote
    total = loads.sum(axis=1, dtype=np.int64)
    peak = (loads / speeds).max(axis=1, initial=0) * speeds.sum(axis=1, dtype=np.int64)
    result: NDArray[np.float64] = np.where(total > 0, peak / np.maximum(total, 1), 1.0)
    return result


def spread(values: NDArray[Any], counts: NDArray[np.integer] | None = None) -> Spread:
    """The spread of ``values`` (n,); with ``counts`` (n,) of values in order, each so often."""
    size = len(values) if counts is None else int(counts.sum())
    if not size:
        return Spread(mean=None, p50=None, p99=None, max=None)
    if counts is None:
        ordered, mean = np.sort(values), float(values.mean())
    else:
        ordered, mean = values, float(values @ counts) / size
        reached: NDArray[np.int64] = np.cumsum(counts)

    def value(position: int) -> float:
        index = position if counts is None else int(np.searchsorted(reached, position, "right"))
        return float(ordered[index])

    def percentile(part: float) -> float:
        position, rest = divmod(part * (size - 1), 1)
        low = value(int(position))
        return low + rest * (value(min(int(position) + 1, size - 1)) - low)

    return Spread(mean=mean, p50=percentile(0.5), p99=percentile(0.99), max=value(size - 1))


def imbalance_snapshot(records: RecordArray, of: str = "") -> ImbalanceSnapshot:
    """The imbalance of ``records`` with figures; ``of`` "time_" the time imbalance."""
    before, after = spread(records[f"{of}before"]), spread(records[f"{of}after"])
    return ImbalanceSnapshot(before=before, after=after)


def mean_floor(records: RecordArray) -> float:
    """The mean of the floor of ``records`` with figures; 1.0 where there are none."""
    return float(records["floor"].mean()) if len(records) else 1.0


def rank_speeds(records: RecordArray) -> list[float]:
    """Speeds of all ranks in the last of ``records``; none where there are no records."""
    speeds: list[float] = (records["speed"][-1:].ravel() / FULL_SPEED).round(4).tolist()
    return speeds


def spent_seconds(stage_ns: ArrayLike) -> NDArray[np.float64]:
    """Time that balancing took on the critical path, from the totals ``stage_ns`` (..., R, stages).

    Ranks without any time have no records and are ignored.
    """
    totals = np.asarray(stage_ns, dtype=np.float64)
    own = totals[..., _OWN].sum(axis=-1).max(axis=-1, initial=0)
    waited = np.where(totals.any(axis=-1), totals[..., Stage.EXCHANGE], np.inf)
    least = waited.min(axis=-1, initial=np.inf)
    spent: NDArray[np.float64] = (own + np.where(np.isinf(least), 0, least)) / 1e9
    return spent


def savings(saved: float, worsened: float, stage_ns: ArrayLike) -> Savings:
    """Seconds that layers took less and more than without balancing, and what its stages took."""
    spent = float(spent_seconds(stage_ns)) + worsened
    return Savings(saved_seconds=saved, spent_seconds=spent, net_seconds=saved - spent)


def stage_seconds(stage_ns: NDArray[np.integer]) -> dict[str, float]:
    """Seconds by name of stage, from ``stage_ns`` (stages,)."""
    return {stage.name.lower(): float(stage_ns[stage] / 1e9) for stage in Stage}


class BatchDecisions(NamedTuple):
    """The batches in some records, each once."""

    numbers: NDArray[np.unsignedinteger]  # (n,) ascending
    decisions: NDArray[np.unsignedinteger]  # (n,) planned if any layer was, else its first layer's
    times_ns: NDArray[np.unsignedinteger]  # (n,) of the first record


def batch_decisions(records: RecordArray) -> BatchDecisions:
    """The batches in ``records`` of the primary rank."""
    numbers, first = np.unique(records["batch"], return_index=True)
    decisions = records["decision"][first]
    is_planned = records["decision"] == Decision.PLANNED
    decisions[np.isin(numbers, records["batch"][is_planned])] = Decision.PLANNED
    return BatchDecisions(numbers, decisions, records["time_ns"][first])


def count_batches(records: RecordArray) -> dict[Decision, int]:
    """Batches of the primary rank's ``records`` by decision: planned if any layer was."""
    codes, counts = np.unique(batch_decisions(records).decisions, return_counts=True)
    return dict(zip(map(Decision, codes.tolist()), counts.tolist(), strict=True))


def parts_by(records: RecordArray, field: str) -> Iterator[tuple[int, RecordArray]]:
    """Every value of ``field``, ascending, and the ``records`` that have it, in their order."""
    order = np.argsort(records[field], kind="stable")
    values, starts = np.unique(records[field][order], return_index=True)
    for value, rows in zip(values.tolist(), np.split(order, starts[1:]), strict=False):
        first, last = int(rows[0]), int(rows[-1])
        is_whole = last - first == len(rows) - 1
        yield value, records[first : last + 1] if is_whole else records[rows]
