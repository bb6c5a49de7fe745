"""What a device tells its host of each layer.

A page is one batch: kernels write every layer's outcome to a line of it in the device's memory, and
one copy in stream order takes all of them to page-locked memory when the batch has been launched.
The host looks at pages whose copy is done when it comes by again. Stages are timed by marks in the
stream, in one batch of several; how long the experts took, in every batch.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.balance.cuda.timing import new_mark
from ultraep_serve.types import Decision, Stage

__all__ = ["TIMED_EVERY", "Lap", "Ledger", "Note", "Page", "Unnoted", "is_capturing"]

TIMED_EVERY = 8  # batches, of which one has its stages timed
_MOST_LAPS = len(Stage) + 1  # of a layer


class Lap(Protocol):
    """What a layer's way through the stages is noted by."""

    def lap(self, stage: Stage) -> None:
        """The stream's time since the last lap goes to ``stage``."""


class Unnoted:
    """What stands in for the note of a layer whose stages nobody times."""

    def lap(self, stage: Stage) -> None:
        pass


class Note:
    """One layer of one batch on its way to the host."""

    def __init__(self, device: torch.device, on_device: torch.Tensor, values: torch.Tensor) -> None:
        """``on_device`` (num_values,) int32 is what ``values`` will be a copy of."""
        self.on_device = on_device
        self._values = values.numpy()
        self._marks: list[Any] = [new_mark(device) for _ in range(_MOST_LAPS + 1)]
        self._experts: tuple[Any, Any] = (new_mark(device), new_mark(device))
        self._passed: list[Stage] = []  # in order, each with a mark behind it
        self.has_begun = self._ended = self.is_timed = False
        self.layer = self.batch = self.tokens = self.micro_batch = 0

    def start(self, layer: int, batch: int, tokens: int, micro_batch: int, timed: bool) -> None:
        """Begin anew, with the time of the first stage where stages are ``timed``."""
        self.layer, self.batch, self.tokens = layer, batch, tokens
        self.micro_batch = micro_batch
        self.has_begun = self._ended = False
        self.is_timed = timed
        self._passed.clear()
        if timed:
            self._marks[0].record()

    def lap(self, stage: Stage) -> None:
        """Stages come in any order, the engine's twice: before experts are awaited and after."""
        if self.is_timed:
            self._passed.append(stage)
            self._marks[len(self._passed)].record()

    def begin_experts(self) -> None:
        """The layer's experts, or the first part of them, are launched next."""
        if not self.has_begun:
            self.has_begun = True
            self._experts[0].record()

    def end_experts(self) -> None:
        """The layer's experts have been launched."""
        self._ended = True
        self._experts[1].record()

    @property
    def values(self) -> NDArray[np.int32]:
        """What kernels wrote, once done; valid until the note is used again."""
        return self._values

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


class Page:
    """All layers of one batch, in the order they ran."""

    def __init__(self, device: torch.device, num_values: int, capacity: int) -> None:
        """Room for ``capacity`` layers of ``num_values`` int32."""
        is_cuda = device.type == "cuda"
        shape = (capacity, num_values)
        self._on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._notes = [
            Note(device, *lines) for lines in zip(self._on_device, self._memory, strict=True)
        ]
        self._done = new_mark(device)
        self.used = 0  # layers

    def open(self) -> Note | None:
        """The next line, if there is one."""
        if self.used == len(self._notes):
            return None
        self.used += 1
        return self._notes[self.used - 1]

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
    def notes(self) -> list[Note]:
        """The notes that were opened."""
        return self._notes[: self.used]


Entry: TypeAlias = Note | Decision  # a layer, or a batch that was skipped as a whole


class Ledger:
    """Pages of batches in the order they ran; some of them still on their way."""

    def __init__(
        self, device: torch.device, num_values: int, num_layers: int, num_micro_batches: int = 1
    ) -> None:
        """At most two batches of ``num_layers`` layers of ``num_values`` int32 are on their way."""
        capacity = num_layers * num_micro_batches
        self._num_layers = num_layers
        self._free = [Page(device, num_values, capacity) for _ in range(2)]
        self._page: Page | None = None  # that is written
        self._open: dict[int, Note] = {}  # by micro-batch
        self._sent: deque[Page | Decision] = deque()
        self._next = 0  # of the first sent page's notes

    def begin(self) -> None:
        """A batch begins: what the one before has left open goes to the host as it is."""
        self._open.clear()
        self._send()

    def open(self, layer: int, batch: int, tokens: int, micro_batch: int = 0) -> Note | None:
        """A note for a layer that starts now, or None where there is no room.

        One of this micro-batch that was not closed until then stays without its last stage.
        """
        self._open.pop(micro_batch, None)
        if self._page is None:
            if not self._free:
                return None
            self._page = self._free.pop()
            self._page.used = 0
        note = self._page.open()
        if note is not None:
            self._open[micro_batch] = note
            note.start(layer, batch, tokens, micro_batch, timed=batch % TIMED_EVERY == 1)
        return note

    def close(self, micro_batch: int = 0) -> Page | None:
        """The engine has computed the layer, in stream order; the page sent with the last."""
        note = self._open.pop(micro_batch, None)
        if note is None:
            return None
        note.lap(Stage.COMPUTE)
        return self._send() if note.layer == self._num_layers - 1 and not self._open else None

    def drop(self, micro_batch: int = 0) -> None:
        """Give up the note that was opened last: nothing is recorded of its layer."""
        if self._open.pop(micro_batch, None) is not None and self._page is not None:
            self._page.used -= 1

    def skip(self, decision: Decision) -> None:
        """A batch was skipped as a whole."""
        self._sent.append(decision)

    def drain(self, most: int) -> Iterator[Entry]:
        """At most so many of what is done, in order; a page is used again after its turn."""
        while self._sent and most > 0:
            first = self._sent[0]
            if isinstance(first, Decision):
                self._sent.popleft()
                most -= 1
                yield first
                continue
            if self._next == 0 and not first.is_done:
                return
            if self._next < first.used:
                self._next += 1
                most -= 1
                yield first.notes[self._next - 1]
            if self._next == first.used:
                self._sent.popleft()
                self._free.append(first)
                self._next = 0

    def _send(self) -> Page | None:
        page = self._page
        if page is None or not page.used:
            return None
        page.send()
        self._sent.append(page)
        self._page = None
        return page


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
