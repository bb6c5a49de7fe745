"""What can go wrong while measuring a running server."""

from ultraep_serve.errors import UltraEPError

__all__ = ["BenchError"]


class BenchError(UltraEPError):
    """The server or the sidecar could not be measured; the message says what to change."""
