"""What a device tells its host of each layer.

Kernels write every layer's outcome to a row of the batch's page in the device's memory, and one
copy in stream order takes the page to page-locked memory when the batch has been launched. The host
reads the pages whose copy is done at its next call. It does not wait for one, but for that of the
batch before last where a batch begins: engines have read that batch's tokens by then. Stages are
timed by marks in the stream, in one batch of several; how long the experts took, in every batch.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.device.outcome import outcome_width, unpack_outcome

from ultraep_serve.balance.cuda.timing import new_mark
from ultraep_serve.types import Outcome, Stage

TIMED_EVERY = 8  # batches with records, of which one has its stages timed
_NUM_PAGES = 3  # a batch that is written, the one before, and the one before that
_MOST_LAPS = len(Stage) + 1  # of a layer


class LayerRow:
    """One layer of one batch on its way to the host."""

    def __init__(self, device: torch.device, outcome: torch.Tensor) -> None:
        """``outcome`` (num_values,) int32 is what kernels write."""
        self.outcome = outcome
        self._marks: list[Any] = [new_mark(device) for _ in range(_MOST_LAPS + 1)]
        self._experts: tuple[Any, Any] = (new_mark(device), new_mark(device))
        self._passed: list[Stage] = []  # in order, each with a mark behind it
        self._ended = self._is_timed = False
        self.layer = self.tokens = self.micro_batch = 0

    def start(self, layer: int, tokens: int, micro_batch: int, *, is_timed: bool) -> None:
        """Begin anew, with the time of the first stage where stages are timed."""
        self.layer, self.tokens, self.micro_batch = layer, tokens, micro_batch
        self._ended, self._is_timed = False, is_timed
        if is_timed:
            self._passed.clear()
            self._marks[0].record()

    def lap(self, stage: Stage) -> None:
        """Count the stream's time since the last lap as ``stage``'s, which come in any order."""
        if self._is_timed:
            self._passed.append(stage)
            self._marks[len(self._passed)].record()

    def begin_experts(self) -> None:
        self._experts[0].record()

    def end_experts(self) -> None:
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


class Page:
    """All layers of one batch, in the order they ran."""

    def __init__(self, device: torch.device, sizes: tuple[int, int, int], capacity: int) -> None:
        """Make room for ``capacity`` layers; ``sizes`` are those of ``outcome_width``."""
        self._sizes = sizes
        shape, is_cuda = (capacity + 1, outcome_width(*sizes)), device.type == "cuda"
        self._on_device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        *lines, spare = self._on_device
        self._rows = [LayerRow(device, line) for line in lines]
        self._spare = LayerRow(torch.device("cpu"), spare)  # whose marks are not the device's
        self._done = new_mark(device)
        self.number, self.is_timed = 0, False  # whether its stages are
        self.used = 0  # rows
        self.is_sent = False

    def start(self, number: int, *, is_timed: bool) -> None:
        self.number, self.is_timed, self.used = number, is_timed, 0
        self.is_sent = False

    def open(self, layer: int, tokens: int, micro_batch: int) -> LayerRow:
        """Return the next row, started; one that nobody reads where a batch has too many layers."""
        row, is_spare = self._spare, self.used == len(self._rows)
        if not is_spare:
            row = self._rows[self.used]
            self.used += 1
        row.start(layer, tokens, micro_batch, is_timed=self.is_timed and not is_spare)
        return row

    def send(self) -> None:
        """Copy what was written to the host, in stream order."""
        lines = slice(self.used)
        self._memory[lines].copy_(self._on_device[lines], non_blocking=True)
        self._done.record()
        self.is_sent = True

    def wait(self) -> None:
        self._done.synchronize()

    @property
    def is_done(self) -> bool:
        """Whether the copy is done, hence everything before it."""
        return bool(self._done.query())

    @property
    def rows(self) -> list[LayerRow]:
        return self._rows[: self.used]

    @property
    def outcome(self) -> Outcome:
        """What kernels wrote of each, once done; valid until the page is used again."""
        return unpack_outcome(self._memory[: self.used].numpy(), *self._sizes)


class Batches:
    """The last batches with records, in the order they ran."""

    def __init__(self, device: torch.device, sizes: tuple[int, int, int], capacity: int) -> None:
        """Make room for ``capacity`` layers in each batch; ``sizes`` as of a page."""
        # the one that was used last is the last
        self._pages = deque(Page(device, sizes, capacity) for _ in range(_NUM_PAGES))
        self._opened = 0
        self.unread: deque[Page] = deque()  # on their way to the host
        # of each layer, in the batch that last was timed
        self._stage_ns = np.zeros((capacity, len(Stage)), np.int64)
        self._timed_tokens = np.ones((capacity, 1), np.int64)

    def next(self, number: int) -> Page:
        """Return the page of the batch that begins; what was on it has been read."""
        page = self._pages[0]
        self._pages.rotate(-1)
        page.start(number, is_timed=self._opened % TIMED_EVERY == 0)
        self._opened += 1
        return page

    @property
    def last(self) -> Page:
        return self._pages[-1]

    @property
    def before_last(self) -> Page:
        """The one before it; without rows where there is none."""
        return self._pages[-2]

    def send(self, page: Page) -> None:
        """Have the host told of a batch that has been launched."""
        page.send()
        self.unread.append(page)

    def done(self, *, until: Page | None = None) -> Iterator[Page]:
        """Yield what is done and unread, in order; up to and with ``until`` all is done."""
        while self.unread and (until in self.unread or self.unread[0].is_done):
            yield self.unread.popleft()

    def stage_times(self, page: Page) -> NDArray[np.int64]:
        """Nanoseconds (N, stages) of its layers: measured, or by tokens of when they last were."""
        numbers = [row.layer for row in page.rows]
        tokens = np.array([[row.tokens] for row in page.rows])
        if page.is_timed:
            measured = np.array([row.nanoseconds for row in page.rows])
            self._timed_tokens[numbers], self._stage_ns[numbers] = tokens, measured
            return measured
        times: NDArray[np.int64] = self._stage_ns[numbers] * tokens // self._timed_tokens[numbers]
        return times
