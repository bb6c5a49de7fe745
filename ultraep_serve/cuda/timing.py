"""How long the device takes, by marks in its stream."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["captured", "device_seconds", "new_mark", "replayed_seconds"]

_REPEATS = 5


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
    """A CUDA event that keeps the time."""
    if device.type != "cuda":
        return _HostMark()
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """Median seconds between the device's start and end of what ``action`` launches, warm.

    Where the host launches slower than the device works, this includes the host's part.
    """
    start, end = new_mark(device), new_mark(device)
    times: list[float] = []
    for _ in range(_REPEATS):
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


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


def replayed_seconds(
    device: torch.device, action: Callable[[], object], repetitions: int = 20
) -> float:
    """Seconds of one ``action`` among ``repetitions`` in a CUDA graph: no launch by the host."""
    if device.type != "cuda":
        action()  # compiles
        return device_seconds(device, action)
    return device_seconds(device, captured(device, action, repetitions)) / repetitions
