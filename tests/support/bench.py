"""Where checks of kernels run, and how kernels are timed there."""

import os
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

import torch

from tests.support.host_driver import HostDriver
from tests.support.interpreter import INTERPRETED
from ultraep_serve.balance.cuda.driver import open_driver
from ultraep_serve.balance.cuda.timing import captured, device_seconds
from ultraep_serve.balance.memory import Driver

PATIENCE_NS = 4_000_000_000  # of a wait for what this process itself has launched before
SIDE_STREAMS = 16
REPETITIONS = 20  # in one graph
T = TypeVar("T")


class Bench:
    """The first GPU; under Triton's interpreter host memory, where nothing has a time."""

    def __init__(self) -> None:
        self.interpreted = INTERPRETED
        # one stream and no graphs, for tools that know neither
        self.plain = INTERPRETED or os.environ.get("ULTRAEP_BENCH_PLAIN") == "1"
        self.device = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)

    def driver(self) -> Driver:
        """The GPU's driver, or what plays it."""
        return HostDriver() if self.interpreted else open_driver(0)

    @cached_property
    def num_programs(self) -> int:
        """Senders of a stream; the default of the setting."""
        return 2 if self.interpreted else 32

    @cached_property
    def _side_streams(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.Stream() for _ in range(SIDE_STREAMS)]

    def at_once(self, functions: list[Callable[[], None]]) -> None:
        """Launch side by side on a few streams; later launches wait for all of them."""
        if self.plain:
            for function in functions:
                function()
            return
        current = torch.cuda.current_stream()
        for first, side in enumerate(self._side_streams):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for function in functions[first :: len(self._side_streams)]:
                    function()
        for side in self._side_streams:
            current.wait_stream(side)

    def capture(self, function: Callable[[], T], repetitions: int = 1) -> Callable[[], T]:
        """Replays a CUDA graph of ``function``, and returns what that computes."""
        if self.plain:
            return function
        results: list[T] = []

        def action() -> None:
            results[:] = [function()]

        replay = captured(self.device, action, repetitions)

        def run() -> T:
            replay()
            return results[0]

        return run

    def replayed(self, function: Callable[[], T]) -> tuple[T, float | None]:
        """What a replayed graph of ``function`` computed, and microseconds of one repetition.

        By CUDA events around a graph of many repetitions, caches warm: no launch by the host.
        """
        replay = self.capture(function, REPETITIONS)
        if self.plain:
            return replay(), None
        seconds = device_seconds(self.device, replay)
        return replay(), seconds * 1e6 / REPETITIONS

    def launched(self, function: Callable[[], object]) -> float | None:
        """Microseconds of what ``function`` launches, by CUDA events, warm."""
        function()
        return None if self.plain else device_seconds(self.device, function) * 1e6
