"""On PYTHONPATH, with the checkout: ranks time themselves by CPU time, and write what layers took.

Python imports this module first. The clock that stages, experts and costs are timed by becomes that
of the thread's CPU time. Once the balancer is there, each layer of a batch leaves an event in the
folder BENCHMARK_EVENTS (``benchmarks/routed.py`` has its fields). Waiting for other ranks is taken
out of it: the exchange of loads and the arrival of copies. A rank that relays copies may wait
inside ``stream``, which is not taken out.
"""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.after_import import after_import

_BALANCER = "ultraep_serve.balance.host.balancer"
_NUM_FIELDS = 9
_cpu, _clock = time.thread_time_ns, time.monotonic_ns
time.perf_counter, time.perf_counter_ns = time.thread_time, time.thread_time_ns


class _Layer:
    """The layer that runs on this rank, and where the one before ended."""

    def __init__(self, rank: int) -> None:
        path = Path(os.environ["BENCHMARK_EVENTS"]) / f"rank-{rank}"
        self._file = path.open("ab", buffering=0)
        self.is_open = False
        self.ended = _cpu()
        self._lines: list[bytes] = []

    def enter(self, number: int, experts: int) -> None:
        self.is_open, self.number = True, number
        self.begin, self.entered = _clock(), _cpu()
        self.waits: list[tuple[int, int]] = []
        self.experts_before = experts

    def leave(self) -> None:
        self.left = _cpu()

    def end(self, experts: int, is_last: bool) -> None:
        now, own = _cpu(), experts - self.experts_before
        waited = sum(end - start for start, end in self.waits)
        counted = (self.waits[0][0] if self.waits else self.left) - self.entered
        planned = self.left - self.entered - counted - waited
        fields = (
            *(self.number, self.begin, _clock(), now - self.entered),
            *(counted, planned, own, now - self.left - own, self.entered - self.ended),
        )
        self._lines.append(struct.pack(f"<{_NUM_FIELDS}q", *fields))
        if is_last:
            self._file.write(b"".join(self._lines))
            self._lines = []
        self.is_open, self.ended = False, _cpu()


def _watch(module: Any) -> None:
    balancer, fabric, clock = module.HostBalancer, module.HostFabric, module.expert_clock
    route, computed, wait = balancer.route, balancer.computed, fabric._wait
    spent, leave = [0], type(clock).__exit__

    def route_watched(self: Any, layer: int, topk_ids: Any, *rest: Any) -> Any:
        found = self.__dict__.get("_watched")
        if found is None:
            found = self._watched = self._fabric.watched = _Layer(self._fabric.rank)
        found.enter(layer, spent[0])
        physical = route(self, layer, topk_ids, *rest)
        found.leave()
        return physical

    def computed_watched(self: Any, *rest: Any) -> None:
        found = self.__dict__.get("_watched")
        if found is not None and found.is_open:
            found.end(spent[0], found.number == len(self._layers) - 1)
        computed(self, *rest)
        if found is not None:
            found.ended = _cpu()

    def wait_watched(self: Any, is_done: Callable[[int], bool], what: str) -> None:
        start = _cpu()
        wait(self, is_done, what)
        found = self.__dict__.get("watched")
        if found is not None and found.is_open and what != "a relayed expert":
            found.waits.append((start, _cpu()))

    def leave_watched(self: Any, *error: Any) -> None:
        spent[0] += _cpu() - self._since
        leave(self, *error)

    balancer.route, balancer.computed, fabric._wait = route_watched, computed_watched, wait_watched
    type(clock).__exit__ = leave_watched


if "BENCHMARK_EVENTS" in os.environ:
    after_import(_BALANCER, _watch)
