"""Experts of a layer on their way into this rank's slots, until the engine launches its own."""

from collections.abc import Callable

from ultraep_serve.balance.cuda.recording import LayerTimer, Untimed
from ultraep_serve.balance.cuda.side_stream import SideStream
from ultraep_serve.balance.speeds import ExpertClock
from ultraep_serve.types import Stage

__all__ = ["Arrival"]


class Arrival:
    """A micro-batch's experts on their way into slots, received before anything reads them."""

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self.timer: LayerTimer = Untimed()  # of the layer that was routed
        self._receive: Callable[[], None] | None = None

    def expect(self, receive: Callable[[], None]) -> None:
        """Keep ``receive``, which waits in the current stream for what is sent beside it."""
        self._receive = receive

    def join(self) -> ExpertClock:
        """Order what is launched next behind all experts sent and received; times that."""
        timer, self.timer = self.timer, Untimed()
        timer.lap(Stage.COMPUTE)  # the engine's dispatch is a part of it
        self.side.join()
        if self._receive is not None:
            receive, self._receive = self._receive, None
            receive()
        timer.lap(Stage.WAIT)
        timer.begin_experts()
        return timer
