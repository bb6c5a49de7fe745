"""What a device tells its host of each layer, without the host ever waiting for it.

A note is one layer of one batch: page-locked memory that a copy in stream order fills, and marks in
the stream. The host looks at notes whose last mark has passed when it comes by again.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.cuda.timing import new_mark
from ultraep_serve.types import Decision, Stage

__all__ = ["Lap", "Ledger", "Note", "Unnoted", "is_capturing"]


class Lap(Protocol):
    """What a layer's way through the stages is noted by."""

    def lap(self, stage: Stage) -> None:
        """The stream's time since the last lap goes to ``stage``."""


class Unnoted:
    """Of a layer that nobody will hear of."""

    def lap(self, stage: Stage) -> None:
        pass


class Note:
    """One layer of one batch on its way to the host."""

    def __init__(self, device: torch.device, num_values: int) -> None:
        """Room for ``num_values`` int32."""
        is_cuda = device.type == "cuda"
        self._memory = torch.zeros(num_values, dtype=torch.int32, pin_memory=is_cuda)
        self._marks: list[Any] = [new_mark(device) for _ in range(len(Stage) + 1)]
        self._experts: tuple[Any, Any] = (new_mark(device), new_mark(device))
        self._begun = self._ended = False
        self.layer = self.batch = self.tokens = self.micro_batch = 0

    def start(self, layer: int, batch: int, tokens: int, micro_batch: int) -> None:
        """Begin anew, with the time of the first stage."""
        self.layer, self.batch, self.tokens = layer, batch, tokens
        self.micro_batch = micro_batch
        self._begun = self._ended = False
        self._marks[0].record()

    def lap(self, stage: Stage) -> None:
        """Every stage must come, in order."""
        self._marks[stage + 1].record()

    def begin_experts(self) -> None:
        """The layer's experts, or the first part of them, are launched next."""
        if not self._begun:
            self._begun = True
            self._experts[0].record()

    def end_experts(self) -> None:
        """They have been launched."""
        self._ended = True
        self._experts[1].record()

    def fill(self, values: torch.Tensor) -> None:
        """Copy ``values`` (num_values,) int32 here, in stream order."""
        self._memory.copy_(values, non_blocking=True)

    @property
    def is_done(self) -> bool:
        """Whether the device has passed the last stage, hence filled everything."""
        return bool(self._marks[-1].query())

    @property
    def values(self) -> NDArray[np.int32]:
        """What ``fill`` copied, once done; valid until the note is used again."""
        return self._memory.numpy()

    @property
    def nanoseconds(self) -> list[int]:
        """The device's time per Stage, once done."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [round(before.elapsed_time(after) * 1e6) for before, after in pairs]

    @property
    def experts_ns(self) -> int:
        """The device's time from the beginning to the end of the experts, once done; 0: unknown."""
        if not self._ended:
            return 0
        begin, end = self._experts
        elapsed: float = begin.elapsed_time(end) * 1e6
        return round(elapsed)


Entry: TypeAlias = Note | Decision  # a layer, or a batch that was skipped as a whole


class Ledger:
    """Notes of layers in the order they ran; some of them still on their way."""

    def __init__(self, device: torch.device, num_values: int, capacity: int) -> None:
        """At most ``capacity`` layers of ``num_values`` int32 are on their way at a time."""
        self._free = [Note(device, num_values) for _ in range(capacity)]
        self._open: dict[int, Note] = {}  # by micro-batch
        self._entries: deque[Entry] = deque()

    def open(self, layer: int, batch: int, tokens: int, micro_batch: int = 0) -> Note | None:
        """A note for a layer that starts now, or None where there is no room.

        One of this micro-batch that was not closed until then is dropped.
        """
        if micro_batch not in self._open:
            if not self._free:
                return None
            self._open[micro_batch] = self._free.pop()
        note = self._open[micro_batch]
        note.start(layer, batch, tokens, micro_batch)
        return note

    def close(self, micro_batch: int = 0) -> None:
        """The engine has computed the layer, in stream order."""
        note = self._open.pop(micro_batch, None)
        if note is not None:
            note.lap(Stage.COMPUTE)
            self._entries.append(note)

    def skip(self, decision: Decision) -> None:
        """A batch was skipped as a whole."""
        self._entries.append(decision)

    def drain(self) -> Iterator[Entry]:
        """Everything that is done, in order; a note is used again after its turn."""
        while self._entries:
            entry = self._entries[0]
            if isinstance(entry, Note) and not entry.is_done:
                return
            yield self._entries.popleft()
            if isinstance(entry, Note):
                self._free.append(entry)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
