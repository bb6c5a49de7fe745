"""On PYTHONPATH, with the checkout: ranks time themselves by CPU time, and write what layers took.

Python imports this module first. The clock that stages, experts and costs are timed by becomes that
of the thread's CPU time. Once the balancer is there, each layer of a batch leaves an event in the
folder BENCHMARK_EVENTS (``benchmarks/routed.py`` has its fields). Waiting for other ranks is taken
out of it: the exchange of loads, the arrival of copies, and sums over ranks, vLLM's and ours, which
are given apart. A rank that relays copies may wait inside ``stream``, which is not taken out.
"""

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.after_import import after_import

_BALANCER = "ultraep_serve.balance.host.balancer"
_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
_HOST_SUMS = "ultraep_serve.balance.host.sums"
_NUM_FIELDS = 13
_MOST_IN_SHARED_MEMORY = 8  # ranks of a group that vLLM's sums there take; others go by gloo
_cpu, _clock = time.thread_time_ns, time.monotonic_ns
time.perf_counter, time.perf_counter_ns = time.thread_time, time.thread_time_ns


class _Sums:
    """CPU time in sums over ranks, where a rank polls until the last one has come."""

    def __init__(self) -> None:
        self.spent, self.ended = 0, 0

    def watch_engine(self, module: Any) -> None:
        kind = module.CpuCommunicator
        shares = kind._all_group_ranks_share_shm_group_name

        def shares_if_few(communicator: Any) -> bool:
            return communicator.world_size <= _MOST_IN_SHARED_MEMORY and bool(shares(communicator))

        kind.all_reduce = self._watched(kind.all_reduce)
        kind._all_group_ranks_share_shm_group_name = shares_if_few

    def watch_host(self, module: Any) -> None:
        module.HostSums.total = self._watched(module.HostSums.total)

    def _watched(self, add_up: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def add_up_watched(adder: Any, given: Any) -> Any:
            start = _cpu()
            total = add_up(adder, given)
            self.ended = _cpu()
            self.spent += self.ended - start
            return total

        return add_up_watched


_SUMS = _Sums()


class _Layer:
    """The layer that runs on this rank, and where the one before ended."""

    def __init__(self, rank: int) -> None:
        path = Path(os.environ["BENCHMARK_EVENTS"]) / f"rank-{rank}"
        self._file = path.open("ab", buffering=0)
        self.is_open = False
        self._lines: list[bytes] = []
        self.rest()

    def enter(self, number: int, experts: int) -> None:
        self.is_open, self.number = True, number
        self.begin, self.entered = _clock(), _cpu()
        self.waits: list[tuple[int, int]] = []
        self.slept = 0
        self.experts_before = experts
        self.sums_before = _SUMS.spent
        self.first_sum = self.sums_before - self.sums_at_rest
        self.routing = self.entered - _SUMS.ended if self.first_sum else 0

    def leave(self) -> None:
        self.left = _cpu()

    def end(self, experts: int, is_last: bool) -> None:
        now, at, own = _cpu(), _clock(), experts - self.experts_before
        second_sum = _SUMS.spent - self.sums_before
        waited = sum(end - start for start, end in self.waits)
        counted = (self.waits[0][0] if self.waits else self.left) - self.entered
        planned = self.left - self.entered - counted - waited
        fields = (
            *(self.begin, at),
            *(counted, planned, own, now - self.left - own - second_sum),
            *(self.entered - self.ended - self.first_sum - self.routing, self.first_sum),
            *(self.routing, second_sum, bool(self.waits)),
            at - self.begin - (now - self.entered) - self.slept,
            self.begin - self.ended_at - (self.entered - self.ended),
        )
        self._lines.append(struct.pack(f"<{_NUM_FIELDS}q", *fields))
        if is_last:
            self._file.write(b"".join(self._lines))
            self._lines = []
        self.is_open = False

    def rest(self) -> None:
        self.ended, self.ended_at = _cpu(), _clock()
        self.sums_at_rest = _SUMS.spent


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
            found.rest()

    def wait_watched(self: Any, is_done: Callable[[int], bool], what: str) -> None:
        start, started_at = _cpu(), _clock()
        wait(self, is_done, what)
        found = self.__dict__.get("watched")
        if found is not None and found.is_open:
            end, at = _cpu(), _clock()
            found.slept += at - started_at - (end - start)
            if what != "a relayed expert":
                found.waits.append((start, end))

    def leave_watched(self: Any, *error: Any) -> None:
        spent[0] += _cpu() - self._since
        leave(self, *error)

    balancer.route, balancer.computed, fabric._wait = route_watched, computed_watched, wait_watched
    type(clock).__exit__ = leave_watched


if "BENCHMARK_EVENTS" in os.environ:
    after_import(_BALANCER, _watch)
    after_import(_COMMUNICATOR, _SUMS.watch_engine)
    after_import(_HOST_SUMS, _SUMS.watch_host)
