"""What a device tells its host of each layer.

Kernels write every layer's outcome to a row of the batch's table in the device's memory, and one
copy in stream order takes the table to page-locked memory when the batch has been launched. The
host reads the tables whose copy is done at its next call. It does not wait for one, but for that of
the batch before last where a batch begins: engines have read that batch's tokens by then. Stages
are timed by marks in the stream, in one batch of several; how long the experts took, in every
batch.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.balance.cuda.timing import new_mark
from ultraep_serve.balance.speeds import ExpertClock
from ultraep_serve.types import Decision, Stage

__all__ = [
    "TIMED_EVERY",
    "UNTIMED",
    "Entry",
    "LayerTimer",
    "PendingBatch",
    "PendingBatches",
    "PendingLayer",
    "is_capturing",
]

TIMED_EVERY = 8  # batches with records, of which one has its stages timed
_NUM_PAGES = 3  # a batch that is written, the one before, and the one before that
_MOST_LAPS = len(Stage) + 1  # of a layer


class LayerTimer(ExpertClock, Protocol):
    """Times a layer's way through the stages, and its experts."""

    def lap(self, stage: Stage) -> None:
        """Count the stream's time since the last lap as ``stage``'s."""

    def begin_experts(self) -> None:
        """Mark the launch of the layer's experts."""


class _Untimed:
    """Stands in for a timer where nobody times a layer."""

    def lap(self, stage: Stage) -> None:
        pass

    def begin_experts(self) -> None:
        pass

    def stop(self) -> None:
        pass


UNTIMED = _Untimed()


class PendingLayer:
    """One layer of one batch on its way to the host."""

    def __init__(self, device: torch.device, on_device: torch.Tensor) -> None:
        """``on_device`` (num_values,) int32 is what kernels write."""
        self.on_device = on_device
        self._marks: list[Any] = [new_mark(device) for _ in range(_MOST_LAPS + 1)]
        self._experts: tuple[Any, Any] = (new_mark(device), new_mark(device))
        self._passed: list[Stage] = []  # in order, each with a mark behind it
        self._ended = self.is_timed = False
        self.layer = self.tokens = self.micro_batch = 0

    def start(self, layer: int, tokens: int, micro_batch: int, timed: bool) -> None:
        """Begin anew, with the time of the first stage where stages are ``timed``."""
        self.layer, self.tokens, self.micro_batch = layer, tokens, micro_batch
        self._ended, self.is_timed = False, timed
        if timed:
            self._passed.clear()
            self._marks[0].record()

    def lap(self, stage: Stage) -> None:
        """See ``LayerTimer``; stages come in any order, the engine's before and after the wait."""
        if self.is_timed:
            self._passed.append(stage)
            self._marks[len(self._passed)].record()

    def begin_experts(self) -> None:
        """See ``LayerTimer``."""
        self._experts[0].record()

    def stop(self) -> None:
        """Mark that the layer's experts have been launched."""
        self._ended = True
        self._experts[1].record()

    @property
    def nanoseconds(self) -> list[int]:
        """The device's time per Stage, once done, where stages are timed; 0: did not run."""
        found = [0] * len(Stage)
        for stage, (before, after) in zip(self._passed, pairwise(self._marks), strict=False):
            found[stage] += round(before.elapsed_time(after) * 1e6)
        return found

    @property
    def experts_ns(self) -> int:
        """The device's time from the beginning to the end of the experts, once done; 0: unknown."""
        if not self._ended:
            return 0
        begin, end = self._experts
        elapsed: float = begin.elapsed_time(end) * 1e6
        return round(elapsed)


class PendingBatch:
    """All layers of one batch, in the order they ran."""

    def __init__(self, device: torch.device, num_values: int, capacity: int) -> None:
        """Make room for ``capacity`` layers of ``num_values`` int32."""
        is_cuda = device.type == "cuda"
        shape = (capacity, num_values)
        self._on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._layers = [PendingLayer(device, line) for line in self._on_device]
        self._done = new_mark(device)
        self.number, self.is_timed = 0, False  # whether its stages are
        self.used = 0  # layers

    def start(self, number: int, timed: bool) -> None:
        """Begin anew, as batch ``number``, whose stages are ``timed``."""
        self.number, self.is_timed, self.used = number, timed, 0

    def open(self, layer: int, tokens: int, micro_batch: int) -> PendingLayer | None:
        """Return the next row, started, if there is one."""
        if self.used == len(self._layers):
            return None
        pending = self._layers[self.used]
        self.used += 1
        pending.start(layer, tokens, micro_batch, self.is_timed)
        return pending

    def send(self) -> None:
        """Copy what was written to the host, in stream order."""
        lines = slice(self.used)
        self._memory[lines].copy_(self._on_device[lines], non_blocking=True)
        self._done.record()

    def wait(self) -> None:
        """Return when the copy is done."""
        self._done.synchronize()

    @property
    def is_done(self) -> bool:
        """Whether the copy is done, hence everything before it."""
        return bool(self._done.query())

    @property
    def layers(self) -> list[PendingLayer]:
        """The layers that were opened."""
        return self._layers[: self.used]

    @property
    def values(self) -> NDArray[np.int32]:
        """What kernels wrote of each, once done; valid until the page is used again."""
        values: NDArray[np.int32] = self._memory[: self.used].numpy()
        return values


Entry: TypeAlias = PendingBatch | Decision  # a batch, or one that was skipped as a whole


class PendingBatches:
    """Batches in the order they ran, some of them still on their way to the host."""

    def __init__(
        self, device: torch.device, num_values: int, num_layers: int, num_micro_batches: int = 1
    ) -> None:
        """Make room for ``num_layers`` layers of ``num_values`` int32 in each batch."""
        capacity = num_layers * num_micro_batches
        self._num_layers = num_layers
        self._pages = deque(
            PendingBatch(device, num_values, capacity) for _ in range(_NUM_PAGES)
        )  # the one that was used last is the last
        self._current: PendingBatch | None = None  # the one that is written
        self._open: dict[int, PendingLayer] = {}  # by micro-batch
        self._number = 0  # of the batch that runs
        self._opened = 0  # batches with layers that are recorded: decode has none
        self._sent: deque[Entry] = deque()

    def begin(self, number: int) -> None:
        """Begin a batch; layers that the one before has left open go to the host as they are."""
        self._number = number
        self._open.clear()
        self._send()

    @property
    def before_last(self) -> PendingBatch:
        """The second last batch that was opened; without layers where there is none."""
        return self._pages[-2]

    @property
    def is_idle(self) -> bool:
        """Whether no batch is written, and nothing is on its way to the host."""
        return self._current is None and not self._sent

    @property
    def is_waiting(self) -> bool:
        """Whether the device has anything of a batch left to do; any thread may ask."""
        return self._current is not None or not self._pages[-1].is_done

    @property
    def has_sent(self) -> bool:
        """Whether anything is on its way to the host."""
        return bool(self._sent)

    def make_room(self) -> Iterator[Entry]:
        """Yield what is left of batches up to the one whose page is used next; all in order."""
        next_page = self._pages[0]
        while any(each is next_page for each in self._sent):
            yield self._sent.popleft()

    def open(self, layer: int, tokens: int, micro_batch: int = 0) -> PendingLayer | None:
        """Return a row for a layer that starts, or None where the batch has more than it should.

        A layer of this micro-batch that is still open stays without its last stage.
        """
        if self._current is None:
            self._current = self._pages[0]
            self._pages.rotate(-1)
            self._current.start(self._number, timed=self._opened % TIMED_EVERY == 0)
            self._opened += 1
        self._open.pop(micro_batch, None)
        pending = self._current.open(layer, tokens, micro_batch)
        if pending is not None:
            self._open[micro_batch] = pending
        return pending

    def close(self, micro_batch: int = 0, *, is_last: bool = False) -> None:
        """End the layer, which the engine has computed; the last one has its batch sent."""
        pending = self._open.pop(micro_batch, None)
        if pending is None:
            return
        pending.lap(Stage.COMPUTE)
        if (is_last or pending.layer == self._num_layers - 1) and not self._open:
            self._send()

    def skip(self, decision: Decision) -> None:
        """Count a batch that was skipped as a whole."""
        self._sent.append(decision)

    def drain(self) -> Iterator[Entry]:
        """Yield what is done, in order; tables are used again afterwards."""
        while self._sent:
            first = self._sent[0]
            if isinstance(first, PendingBatch) and not first.is_done:
                return
            yield self._sent.popleft()

    def _send(self) -> None:
        sent = self._current
        if sent is not None and sent.used:
            sent.send()
            self._sent.append(sent)
            self._current = None


def is_capturing(ids: torch.Tensor) -> bool:
    """Whether what is launched now for ``ids`` goes into a CUDA graph instead of being run."""
    return ids.is_cuda and torch.cuda.is_current_stream_capturing()
