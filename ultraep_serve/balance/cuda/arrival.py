"""Experts on their way into this rank's slots, beside the stream that the engine launches in."""

from collections.abc import Callable
from typing import Protocol

import torch
from ultraep_kernels.device.launch import Launches

from ultraep_serve.balance.cuda.recording import UNTIMED, LayerTimer
from ultraep_serve.balance.speeds import ExpertClock
from ultraep_serve.types import Stage

__all__ = ["Arrival", "SideStream", "side_stream"]


class SideStream(Protocol):
    """Runs beside the current stream from a launch to the next ``join``."""

    def launch(self, launches: Launches, action: Callable[[], object]) -> None:
        """Have ``launches`` make ``action`` behind all that was launched before."""

    def join(self) -> None:
        """Have the current stream wait for what was launched, if anything was."""


class _CudaSideStream:
    """A CUDA stream of higher priority, which what runs beside it does not keep from running.

    torch.cuda's own streams and events ask for the current stream in Python, ten microseconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device, priority=-1)
        self._forked, self._done = torch.Event(device), torch.Event(device)
        self._has_forked = False

    def launch(self, launches: Launches, action: Callable[[], object]) -> None:
        self._forked.record()
        self._forked.wait(self._stream)
        self._has_forked = True
        try:
            launches.make(action, stream=self._stream)
        finally:
            self._done.record(self._stream)

    def join(self) -> None:
        if self._has_forked:
            self._has_forked = False
            self._done.wait()


class _InOrder:
    """What stands in for a ``SideStream`` where the device is the host."""

    def launch(self, launches: Launches, action: Callable[[], object]) -> None:
        launches.make(action)

    def join(self) -> None:
        pass


def side_stream(device: torch.device) -> SideStream:
    """A stream beside the engine's; where ``device`` is the host, all runs in order."""
    return _CudaSideStream(device) if device.type == "cuda" else _InOrder()


class Arrival:
    """A micro-batch's experts on their way into slots, received before anything reads them."""

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self.timer: LayerTimer = UNTIMED  # of the layer that was routed
        self._receive: Callable[[], None] | None = None

    def expect(self, receive: Callable[[], None]) -> None:
        """Keep ``receive``, which waits in the current stream for what is sent beside it."""
        self._receive = receive

    def join(self) -> ExpertClock:
        """Order what is launched next behind all experts sent and received; times that."""
        timer, self.timer = self.timer, UNTIMED
        timer.lap(Stage.COMPUTE)  # the engine's dispatch is a part of it
        if self._receive is not None:
            self.side.join()
            receive, self._receive = self._receive, None
            receive()
        timer.lap(Stage.WAIT)
        timer.begin_experts()
        return timer
