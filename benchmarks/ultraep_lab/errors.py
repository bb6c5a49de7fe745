"""Errors of the lab, beside those of ``ultraep_serve.errors``."""

from ultraep_serve.errors import UltraEPError


class TraceError(UltraEPError, ValueError):
    """A trace cannot be read, written, made or replayed; the message says what to change."""


class PlanError(UltraEPError):
    """A replayed policy made a plan that breaks a rule: a mistake in it; the message names both."""


class BenchError(UltraEPError):
    """The server or the sidecar could not be measured; the message says what to change."""


class ServerError(UltraEPError):
    """A server that was started to be measured did not come up; the message ends with its log."""
