"""What every rank did, in shared memory: written on the hot path, read by anyone of the same user.

``recorder`` writes what ``schema`` lays out, ``reader`` reads it, ``summary`` sums it up into the
nouns of ``snapshot``; ``control`` carries the policy the other way. Only numpy and the standard
library are needed.
"""

from ultraep_serve.observability.control import ControlError, ControlPage
from ultraep_serve.observability.reader import Poll, RingReader
from ultraep_serve.observability.recorder import Recorder
from ultraep_serve.observability.schema import (
    SCHEMA_VERSION,
    RingError,
    RingHeader,
    RingState,
    ring_path,
)
from ultraep_serve.observability.snapshot import BalanceSnapshot, RankView
from ultraep_serve.observability.summary import summarise
from ultraep_serve.observability.window import Window

__all__ = [
    "SCHEMA_VERSION",
    "BalanceSnapshot",
    "ControlError",
    "ControlPage",
    "Poll",
    "RankView",
    "Recorder",
    "RingError",
    "RingHeader",
    "RingReader",
    "RingState",
    "Window",
    "ring_path",
    "summarise",
]
