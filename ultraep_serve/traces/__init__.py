"""Traces of routing: load, save, make, cut into batches, replay under any policy."""

from ultraep_serve.traces.batches import batches
from ultraep_serve.traces.errors import TraceError
from ultraep_serve.traces.generate import make_trace
from ultraep_serve.traces.replay import PolicyReplay, Replay, ReplayOptions, replay
from ultraep_serve.traces.report import replay_document, write_document, write_plans
from ultraep_serve.traces.store import load_trace, save_trace
from ultraep_serve.traces.trace import (
    DECODE,
    PREFILL,
    LoadTrace,
    Trace,
    concatenate,
    of_phase,
)
from ultraep_serve.traces.workloads import KINDS, Workload

__all__ = [
    "DECODE",
    "KINDS",
    "PREFILL",
    "LoadTrace",
    "PolicyReplay",
    "Replay",
    "ReplayOptions",
    "Trace",
    "TraceError",
    "Workload",
    "batches",
    "concatenate",
    "load_trace",
    "make_trace",
    "of_phase",
    "replay",
    "replay_document",
    "save_trace",
    "write_document",
    "write_plans",
]
