"""How fast the ranks are: each measures its own experts, all agree on the same whole numbers.

A rank times what it computes itself, between its waits for the others, and publishes the time per
assignment with its loads. From the same published numbers every rank derives the same speeds, once
per batch, so that all layers of a batch agree.

Noise must not change a plan, and a plan must not change what is measured:

- A layer takes a fixed time whatever its load. It is counted as assignments, as many as the cost
  model says, or a rank with little to do would seem slow and get less still.
- What is published is a short one of the last batches' times: a rank that is slower is so in nearly
  all of them, while disturbances only make some longer.
- Speeds follow only what differs clearly from those in use, and not further than a step at a time.
"""

import time
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host.speeds import follow, full_speeds, whole_speeds

from ultraep_serve.costs.calibration import LEAST_ROWS
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.errors import ConfigError
from ultraep_serve.types import ExpertShape, SpeedSource, parse_speeds

__all__ = [
    "ExpertClock",
    "HostClock",
    "OwnTime",
    "RankSpeeds",
    "fixed_speeds",
]

_BATCHES = 41  # looked back on, of which the one in this place, by time, is published
_PLACE = 10
_LEAST_PICOSECONDS = 5 * 10**9  # of a batch, by the cost model; less is mostly disturbances

Integers = NDArray[np.integer]


class ExpertClock(Protocol):
    """Runs while an engine computes the experts of a layer, or launches them."""

    def stop(self) -> None:
        """Stop, before what the experts gave is combined with what others gave."""


class HostClock:
    """An ``ExpertClock`` of this thread's time; starts when it is made."""

    def __init__(self) -> None:
        self.nanoseconds = 0  # until it is stopped
        self._since = time.perf_counter_ns()

    def stop(self) -> None:
        self.nanoseconds = time.perf_counter_ns() - self._since


class OwnTime:
    """What an assignment takes on this rank, in picoseconds."""

    def __init__(self, costs: IntegerCosts | None, num_masters: int) -> None:
        """``costs``, the same on every rank, say what is fixed; without them nothing is known.

        ``num_masters`` experts per rank.
        """
        self._costs = costs
        self._fixed = costs.base // costs.per_assignment if costs is not None else 0
        self._least_load = LEAST_ROWS * num_masters  # that a layer is measured with
        self._batches: deque[int] = deque(maxlen=_BATCHES)
        self._nanoseconds = self._work = self._shortest = 0  # of the batch that runs

    def add(self, nanoseconds: int, own_load: int, least_load: int) -> None:
        """Count a layer of the batch, in which this rank computed ``own_load`` assignments.

        No rank computed fewer than ``least_load``; 0 ``nanoseconds`` where nobody measured.

        Experts with few rows may run in another kernel, whose times the costs do not describe.
        """
        if self._costs is not None and nanoseconds and least_load >= self._least_load:
            self._nanoseconds += nanoseconds
            self._work += own_load + self._fixed
            self._shortest += least_load * self._costs.per_assignment

    def end_batch(self) -> None:
        """End the batch. It counts on all ranks or on none, since all know its loads."""
        if self._shortest >= _LEAST_PICOSECONDS:
            self._batches.append(self._nanoseconds * 1000 // self._work)
        self._nanoseconds = self._work = self._shortest = 0

    @property
    def picoseconds(self) -> int:
        """What the last batches show an assignment takes; 0 until there are enough."""
        if len(self._batches) < _BATCHES:
            return 0
        return max(1, sorted(self._batches)[_PLACE])


class RankSpeeds:
    """What this rank publishes, and the speeds (R,) that all ranks plan a batch with."""

    def __init__(
        self, setting: str, rank: int, shape: ExpertShape, costs: IntegerCosts | None
    ) -> None:
        """Take ``setting`` as configured. Raises ConfigError, see ``fixed_speeds``."""
        self._configured = fixed_speeds(setting, shape.num_ranks)
        self._rank = rank
        self._own = OwnTime(costs, shape.num_masters)
        self._agreed = self.values = full_speeds(shape.num_ranks)

    def end_batch(self) -> int:
        """End the batch before; returns what to publish, see ``OwnTime.picoseconds``."""
        self._own.end_batch()
        return self._own.picoseconds

    def begin_batch(self, picoseconds: Integers, source: SpeedSource) -> None:
        """Set ``values`` to those from ``source``; ``picoseconds`` (R,) is what ranks published."""
        self._agreed = follow(picoseconds, self._agreed)
        if source is SpeedSource.EQUAL:
            self.values = full_speeds(self.values.size)
        elif source is SpeedSource.AUTO or self._configured is None:
            self.values = self._agreed
        else:
            self.values = self._configured

    def add_layer(self, nanoseconds: int, rank_load: Integers) -> None:
        """Count a layer whose experts took ``nanoseconds`` here; ``rank_load`` (R,) as computed."""
        self._own.add(nanoseconds, int(rank_load[self._rank]), int(rank_load.min()))


def fixed_speeds(text: str, num_ranks: int) -> NDArray[np.int64] | None:
    """Speeds (R,) that the setting ``text`` fixes, the largest FULL_SPEED; None for "auto".

    Raises ConfigError unless there is one per rank.
    """
    if text == SpeedSource.AUTO.value:
        return None
    values = parse_speeds(text)
    if values and len(values) != num_ranks:
        raise ConfigError(f"speeds = {text!r} has {len(values)} numbers for {num_ranks} ranks")
    return whole_speeds(values) if values else full_speeds(num_ranks)
