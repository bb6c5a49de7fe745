"""HTTP connections that nobody can hold open to keep others out.

uvicorn by itself limits neither their number nor how long the head of a request may take.
"""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HEAD_BYTES", "MAX_CONNECTIONS", "LimitedProtocol"]

MAX_CONNECTIONS = 512
HEAD_SECONDS = 10.0  # for a request's head to be complete, from when the connection is made
HEAD_BYTES = 16 << 10


class LimitedProtocol(H11Protocol):
    """One connection. A new one beyond the limit takes the place of the quietest.

    Those that wait for a request go first, so that whoever asks, as probes do, gets an answer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heard_at = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it."""
        super().connection_made(transport)
        self._time_head()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [cast(LimitedProtocol, other) for other in self.connections - {self}]
            quietest = min(others, key=lambda other: (not other.is_waiting, other._heard_at))
            quietest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """The head of a request, a part of one, or a body."""
        self._heard_at = self.loop.time()
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget its timer."""
        super().connection_lost(exc)
        self._stop_timer()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _time_head(self) -> None:
        """Close it where the head of a request is begun and does not end in time."""
        if not self.is_waiting:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close)

    def _close(self) -> None:
        if self.is_waiting:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
