"""How fast the ranks are: each measures its own experts, all agree on the same whole numbers.

A rank times what it computes itself, between its waits for the others, and publishes the time per
assignment with its loads. From the same published numbers every rank derives the same speeds
(``measured_speeds``), so that all layers of a batch agree.

Noise must not change a plan, and a plan must not change what is measured:

- A layer takes a fixed time whatever its load. It is counted as assignments, as many as the cost
  model says, or a rank with little to do would seem slow and get less still.
- What is published is a short one of the last batches' times: a rank that is slower is so in nearly
  all of them, while disturbances only make some longer. It changes where it differs clearly.
"""

from collections import deque

from ultraep_serve.costs.calibration import LEAST_ROWS
from ultraep_serve.costs.model import IntegerCosts

_BATCHES = 41  # looked back on, of which the one in this place, by time, is published
_PLACE = 10
_CLEARLY = 16  # a difference of more than this part of what is published
_LEAST_PICOSECONDS = 5 * 10**9  # of a batch, by the cost model; less is mostly disturbances


class OwnTime:
    """What an assignment takes on this rank."""

    def __init__(self, costs: IntegerCosts, num_masters: int) -> None:
        """``costs``, alike on every rank, say what is fixed; each has ``num_masters`` experts."""
        self.picoseconds = 0  # that the last batches show; 0 until there are enough
        self._costs = costs
        self._fixed = costs.base // costs.per_assignment
        self._least_load = LEAST_ROWS * num_masters  # that a layer is measured with
        self._batches: deque[int] = deque(maxlen=_BATCHES)

    def add_batch(self, nanoseconds: list[int], own_load: list[int], least_load: list[int]) -> None:
        """Count a batch: by layer how long experts took, and the assignments of this rank.

        No rank computed fewer than ``least_load``; 0 ``nanoseconds`` where nobody measured. Experts
        with few rows may run in another kernel, whose times the costs do not describe. A batch
        counts on all ranks or on none, since all know its loads.
        """
        spent = work = shortest = 0
        for took, own, least in zip(nanoseconds, own_load, least_load, strict=True):
            if took and least >= self._least_load:
                spent, work = spent + took, work + own + self._fixed
                shortest += least * self._costs.per_assignment
        if shortest < _LEAST_PICOSECONDS:
            return
        self._batches.append(spent * 1000 // work)
        if len(self._batches) == _BATCHES:
            found = max(1, sorted(self._batches)[_PLACE])
            if abs(found - self.picoseconds) * _CLEARLY > self.picoseconds:
                self.picoseconds = found
