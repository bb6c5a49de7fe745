"""The error of this room."""

from ultraep_serve.errors import UltraEPError

__all__ = ["TraceError"]


class TraceError(UltraEPError):
    """A trace cannot be read, written, made or replayed; the message says what to change."""
