"""What is held of the ranks' records: one row for each layer of a batch, with what all ranks told.

All ranks of a pipeline stage plan alike, so loads and plan of a row are from the rank that was read
first; bytes and times are each rank's own. Rows are kept for 15 minutes, up to the newest one, and
fewer where many ranks and experts make them large.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.telemetry.record import RecordArray, record_dtype
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision, Policy, Stage

WINDOW_SECONDS = 900
_MAX_BYTES = 64 << 20  # of the rows of a pipeline stage
IMBALANCES = ("before", "after", "time_before", "time_after")
_SHARED = (
    "batch", "time_ns", "layer", "tokens", "replicas", "decision", "policy", "load_before",
    "load_after", "speed", "slot_expert", "is_copied", "slot_load", "expert_load",
)  # fmt: skip
_OWN = ("bytes_sent", "bytes_received", "stage_ns")  # of every rank
# The policy considered the loads; those of other decisions never reached the planner.
_CONSIDERED = (Decision.PLANNED, Decision.BALANCED, Decision.UNPROFITABLE)


class Rows:
    """Some rows: a column (n, ...) for each name, cut when it is read.

    Columns are the fields of a record, those of ``_OWN`` for every rank, and figures. ``before``
    and ``after`` are imbalances, ``time_before`` and ``time_after`` time imbalances, ``floor`` is
    the lowest time imbalance that copies inside domains can reach, ``avoided`` the estimated
    seconds that balancing took off (negative where the busiest rank got more).
    """

    def __init__(
        self, columns: Mapping[str, NDArray[Any]], places: NDArray[np.intp] | None = None
    ) -> None:
        """All rows of ``columns``, or those at ``places``."""
        self._columns, self._places = columns, places

    def __getitem__(self, name: str) -> NDArray[Any]:
        column = self._columns[name]
        return column if self._places is None else column[self._places]

    def __len__(self) -> int:
        return len(self._columns["key"] if self._places is None else self._places)

    def at(self, places: NDArray[np.intp]) -> "Rows":
        """Those at ``places`` among these."""
        return Rows(self._columns, places if self._places is None else self._places[places])

    def where(self, keep: NDArray[np.bool_]) -> "Rows":
        """Those for which ``keep`` (n,) is true."""
        return self if keep.all() else self.at(np.flatnonzero(keep))

    def first(self) -> dict[str, Any]:
        """The first of these, by name of column."""
        return {name: self[name][0] for name in self._columns}

    def by(self, values: NDArray[Any]) -> "Iterator[tuple[int, Rows]]":
        """Every one of ``values`` (n,), ascending, and the rows that have it, in order."""
        order = np.argsort(values, kind="stable")
        found, starts = np.unique(values[order], return_index=True)
        for value, places in zip(found.tolist(), np.split(order, starts[1:]), strict=False):
            yield value, self.at(places)

    @classmethod
    def together(cls, parts: "list[Rows]") -> "Rows":
        """Those of all ``parts``, ordered by time."""
        if len(parts) == 1:
            return parts[0]
        names = parts[0]._columns
        rows = cls({name: np.concatenate([part[name] for part in parts]) for name in names})
        return rows.at(np.argsort(rows["time_ns"], kind="stable"))


def considered(rows: Rows, policy: Policy | None = None) -> Rows:
    """Those of ``rows`` with an imbalance: whose loads a policy considered.

    None: any policy that gives right answers.
    """
    decisions = (Decision.FORCED,) if policy is Policy.IDEAL else _CONSIDERED
    return rows.where(np.isin(rows["decision"], decisions))


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


class StageWindow:
    """The rows of one pipeline stage, whose layers count over all stages."""

    def __init__(self, header: RingHeader, first_layer: int) -> None:
        """``header`` is that of any rank of the stage, ``first_layer`` the number of its first."""
        self.shape, self._domain_size = header.shape, header.location.domain_size
        self._num_layers, self._first_layer = header.num_layers, first_layer
        self._buffers = self._new_rows(np.empty(0, record_dtype(header.shape)))
        self._begin = self._end = 0  # of the rows in the buffers
        self._last = -1  # key of the newest row
        row_bytes = sum(
            buffer.itemsize * int(np.prod(buffer.shape[1:])) for buffer in self._buffers.values()
        )
        self._max_rows = max(1, _MAX_BYTES // row_bytes)

    @property
    def rows(self) -> Rows:
        """Oldest first. Only columns of ranks that were not read yet change later."""
        return Rows({name: b[self._begin : self._end] for name, b in self._buffers.items()})

    def add(self, rank: int, records: RecordArray) -> Rows:
        """Add what ``rank``, by its place in the stage, has written; return the rows that are new.

        Of a row that another rank has begun its columns are filled in. A record is left out where
        another rank's later ones came first.
        """
        keys = self._keys(records)
        new = self._new_rows(records[keys > self._last])
        self._append(new)
        rows = self.rows
        places = np.searchsorted(rows["key"], keys)
        found = places < len(rows)
        found[found] = rows["key"][places[found]] == keys[found]
        for name in _OWN:
            rows[name][places[found], rank] = records[name][found]
        return Rows(new)

    def _keys(self, records: RecordArray) -> NDArray[np.int64]:
        """The place of each record among all layers of all batches."""
        of_batch = records["batch"].astype(np.int64) * self._num_layers
        keys: NDArray[np.int64] = of_batch + records["layer"]
        return keys

    def _new_rows(self, records: RecordArray) -> dict[str, NDArray[Any]]:
        """The columns of one rank's ``records`` (n,), nothing yet in those of every rank."""
        count, num_ranks = len(records), self.shape.num_ranks
        rows = {name: records[name].copy() for name in _SHARED}
        rows["key"] = self._keys(records)
        rows["layer"] += self._first_layer
        for name in ("bytes_sent", "bytes_received"):
            rows[name] = np.zeros((count, num_ranks), np.int64)
        rows["stage_ns"] = np.zeros((count, num_ranks, len(Stage)), np.float32)
        speeds = rows["speed"]
        for when in ("before", "after"):
            loads = rows[f"load_{when}"]
            rows[when], rows[f"time_{when}"] = imbalances(loads), imbalances(loads, speeds)
        domains = num_ranks // self._domain_size, self._domain_size
        by_domain = (
            values.reshape(count, *domains).sum(axis=2, dtype=np.int64)
            for values in (rows["load_before"], speeds)
        )
        rows["floor"] = imbalances(*by_domain)
        seconds = records["stage_ns"][:, Stage.COMPUTE] / 1e9
        rows["avoided"] = seconds * (rows["time_before"] / rows["time_after"] - 1)
        return rows

    def _append(self, new: dict[str, NDArray[Any]]) -> None:
        count = len(new["key"])
        if not count:
            return
        self._last = int(new["key"][-1])
        if self._end + count > len(self._buffers["key"]):
            self._make_room(count)
        for name, buffer in self._buffers.items():
            buffer[self._end : self._end + count] = new[name]
        self._end += count
        self._begin = max(self._begin, self._end - self._max_rows)
        times = self._buffers["time_ns"][self._begin : self._end]
        oldest = max(0, int(times[-1]) - WINDOW_SECONDS * 10**9)
        self._begin += int((times >= oldest).argmax())

    def _make_room(self, count: int) -> None:
        """Move the rows to larger buffers; answers may still read the old ones."""
        held = slice(self._begin, self._end)
        kept = self._end - self._begin
        size = max(64, kept + count + min(kept + count, self._max_rows // 4))
        larger = {}
        for name, buffer in self._buffers.items():
            larger[name] = np.empty((size, *buffer.shape[1:]), buffer.dtype)
            larger[name][:kept] = buffer[held]
        self._buffers, self._begin, self._end = larger, 0, kept


# Fine near 1, the goal of balancing, coarse where one rank does everything.
BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0)


@dataclass(frozen=True)
class Totals:
    """What all rows since the start add up to."""

    counts: Mapping[str, NDArray[np.int64]]  # by imbalance: up to each of BOUNDS, and above
    sums: Mapping[str, float]  # by imbalance
    saved_seconds: float = 0.0
    worsened_seconds: float = 0.0  # of layers whose busiest rank got more

    @classmethod
    def none(cls) -> "Totals":
        empty = np.zeros(len(BOUNDS) + 1, np.int64)
        return cls(dict.fromkeys(IMBALANCES, empty), dict.fromkeys(IMBALANCES, 0.0))

    def plus(self, rows: Rows) -> "Totals":
        """With ``rows`` that a policy considered."""
        places = {name: np.searchsorted(BOUNDS, rows[name]) for name in IMBALANCES}
        found = {
            name: np.bincount(place, minlength=len(BOUNDS) + 1) for name, place in places.items()
        }
        avoided = rows["avoided"]
        return Totals(
            {name: self.counts[name] + found[name] for name in IMBALANCES},
            {name: self.sums[name] + float(rows[name].sum()) for name in IMBALANCES},
            self.saved_seconds + float(avoided[avoided > 0].sum()),
            self.worsened_seconds - float(avoided[avoided < 0].sum()),
        )
