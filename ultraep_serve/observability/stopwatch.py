"""How long each verb of a layer took."""

import time

import numpy as np

from ultraep_serve.types import Verb

__all__ = ["Stopwatch"]


class Stopwatch:
    """Nanoseconds per verb, running from its creation on."""

    def __init__(self) -> None:
        self.nanoseconds = np.zeros(len(Verb), dtype=np.int64)
        self._last = time.perf_counter_ns()

    def lap(self, verb: Verb) -> None:
        """The time since the last lap went to ``verb``."""
        now = time.perf_counter_ns()
        self.nanoseconds[verb] += now - self._last
        self._last = now
