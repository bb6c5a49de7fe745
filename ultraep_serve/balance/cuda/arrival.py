"""Experts of a layer on their way into this rank's slots, until the engine launches its own."""

from collections.abc import Callable

from ultraep_serve.balance.cuda.recording import PendingLayer
from ultraep_serve.balance.cuda.side_stream import SideStream
from ultraep_serve.types import Stage

__all__ = ["Arrival"]


class Arrival:
    """A micro-batch's experts on their way into slots, received before anything reads them."""

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self.pending: PendingLayer | None = None  # the layer, where its experts are timed
        self._receive: Callable[[], None] | None = None

    def expect(self, receive: Callable[[], None]) -> None:
        """Keep ``receive``, which waits in the current stream for what is sent beside it."""
        self._receive = receive

    def join(self) -> None:
        """Order what is launched next behind all experts sent and received."""
        self.side.join()
        if self._receive is not None:
            receive, self._receive = self._receive, None
            receive()

    def begin_experts(self) -> None:
        """See ``StreamMarks``; engines may launch a layer's experts in parts."""
        pending = self.pending
        if pending is None or pending.has_begun:
            self.join()
            return
        pending.lap(Stage.COMPUTE)
        self.join()
        pending.lap(Stage.WAIT)
        pending.begin_experts()

    def end_experts(self) -> None:
        """See ``StreamMarks``."""
        if self.pending is not None:
            self.pending.end_experts()
