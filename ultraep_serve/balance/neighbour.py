"""Another rank of this host, as its ring and its process show it."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from ultraep_serve.errors import RingError
from ultraep_serve.system.topology import process_namespace, process_state
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingHeader

__all__ = ["Neighbour"]

_COMPUTING = 0.05  # of one CPU that a process which computes uses at least


@dataclass
class Neighbour:
    """Another rank of this host."""

    path: Path
    reader: RingReader | None = None
    heartbeat_ns: int = 0
    cpu_seconds: float = 0.0  # CPU time of its process when it was looked at last

    def header(self, *, reopen: bool) -> RingHeader | None:
        """Its ring's header; ``reopen`` where another file may have taken the ring's place."""
        with contextlib.suppress(RingError):
            if self.reader is None or reopen:
                fresh = RingReader(self.path)
                self.close()
                self.reader = fresh
        with contextlib.suppress(RingError):
            return self.reader.header() if self.reader else None
        return None

    def beats(self, header: RingHeader) -> bool:
        """Whether ``header`` has another heartbeat than before."""
        before, self.heartbeat_ns = self.heartbeat_ns, header.heartbeat_ns
        return self.heartbeat_ns != before

    def computes(self, header: RingHeader, step: float) -> bool:
        """Whether its process used a CPU for some of the last ``step`` seconds, or waits for one.

        No process that was stopped, or is gone, does; nor is one seen in another namespace.
        """
        if header.process_namespace != process_namespace():
            return False
        state, used = process_state(header.pid)
        before, self.cpu_seconds = self.cpu_seconds, used
        return state == "R" or used - before > _COMPUTING * step

    def close(self) -> None:
        """Close its ring."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None
