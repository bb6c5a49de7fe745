"""How long the device takes, by marks in its stream."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_REPEATS, _REPLAYED = 5, 20
_LEAST_SECONDS = 1e-9  # an event's clock is coarser


class _HostMark:
    """What stands in for a CUDA event where the device is the host."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_HostMark") -> float:
        """Milliseconds."""
        return (end._seconds - self._seconds) * 1e3


def new_mark(device: torch.device) -> Any:
    """An event of the device that keeps the time."""
    return torch.Event(device, enable_timing=True) if device.type == "cuda" else _HostMark()


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Median seconds that the device takes for what ``action`` launches, back to back.

    Nobody waits between repetitions, and one before them keeps the device busy until the first is
    launched. Where the host launches slower than the device works, this includes the host's part.
    Never 0.
    """
    marks = [new_mark(device) for _ in range(_REPEATS + 1)]
    for mark in marks:
        action()
        mark.record()
    marks[-1].synchronize()
    times: list[float] = [
        before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)
    ]
    return max(statistics.median(times), _LEAST_SECONDS)


def captured(
    device: torch.device, action: Callable[[], object], repetitions: int = 1
) -> Callable[[], object]:
    """Replays a CUDA graph of so many repetitions of ``action``, which also runs once now."""
    action()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # other threads of the engine may go on calling CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repetitions):
            action()
    return graph.replay


def replayed_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Seconds of one ``action`` among others in a CUDA graph: no launch by the host."""
    if device.type != "cuda":
        action()  # compiles
        return device_seconds(device, action)
    return device_seconds(device, captured(device, action, _REPLAYED)) / _REPLAYED
