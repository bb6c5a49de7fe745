"""Ranks whose host code runs as it is: its launches, copies and streams become work of a machine.

Every rank has a ``DeviceBalancer`` over memory that is mapped into all of them at addresses of
their own (``HostDriver``). While ranks are ``driven``, Triton's launches, copies that do not block
and forks and joins of the side stream are written down in stream order; ``run`` executes them.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from ultraep_kernels.device.exchange import Inboxes, exchange, inbox_bytes, new_epoch
from ultraep_kernels.device.status import new_status

from tests.emulated_gpu.kernels.compiled import Change, Prepared, prepare
from tests.emulated_gpu.kernels.machine import Machine, Options
from tests.emulated_gpu.kernels.ranks import (
    PATIENCE_NS,
    Rank,
    Stream,
    Weights,
    connect_all,
    measured_picoseconds,
    new_rank,
)
from tests.support.costs import FREE
from tests.support.offline import Launch, recorded_launches
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda import micro_batch
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.pages import Page

__all__ = ["Cluster", "Work"]

_BYTE = 1  # tensors of experts lie at any byte


@dataclass
class Work:
    """Something in a stream: a launch, or what the host has the device do."""

    rank: int
    before: set[int]  # numbers of work that ends first
    launch: Prepared | None = None
    action: Callable[[], None] | None = None
    gang: bool = False


class _Gather:
    """An all-gather over ranks of all domains, in stream order."""

    def __init__(self, cluster: "Cluster", rank: int) -> None:
        self._cluster, self._rank = cluster, rank

    def gather(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """As ``DeviceAllGather.gather``."""
        self._cluster.gather(self._rank, row, rows)


class _Side:
    """``SideStream`` of one rank's micro-batch."""

    stream = None  # of torch; launches go to the one that is current

    def __init__(self, cluster: "Cluster", rank: Rank) -> None:
        self._cluster, self._rank = cluster, rank
        self._engine, self._side, self._has_forked = rank.stream, Stream(), False

    def __enter__(self) -> None:
        self._cluster.take_launches()
        self._has_forked = True
        if self._cluster.forgets != "fork":
            self._side.last |= self._engine.last
        self._rank.stream = self._side

    def __exit__(self, *_: object) -> None:
        self._cluster.take_launches()
        self._rank.stream = self._engine

    def join(self) -> None:
        self._cluster.take_launches()
        if self._has_forked:
            self._has_forked = False
            if self._cluster.forgets != "join":
                self._engine.last |= self._side.last


class Cluster:
    """All ranks of a group, and the machine that executes what they launch."""

    def __init__(
        self, setup_of: Callable[[int], GroupSetup], num_layers: int, weights: Weights,
        options: Options, change: Change | None = None, forgets: str = "",
        patience_ns: int = PATIENCE_NS,
    ) -> None:  # fmt: skip
        """``change`` of the compiled kernels; ``forgets``, a mistake: what hosts leave out.

        "join": experts come without the side stream, "fork": that begins without the plan.
        """
        shape = setup_of(0).shape
        self.forgets = forgets
        self._change = change
        self.machine = Machine(shape.num_ranks, options)
        self._works: list[Work] = []
        self._numbers: list[int] = []  # of the machine, of works that it has
        self._known: list[tuple[int, int]] = []  # memory that the machine knows, sorted
        self._kept: list[Any] = []  # whatever the machine may still read
        self._launches: list[Launch] = []
        self._seen = self.num_launches = 0
        self._gathers: list[list[tuple[int, torch.Tensor]]] = []
        self._gathered = [0] * shape.num_ranks
        self._dispatches: list[tuple[Inboxes, torch.Tensor]] = []
        self._current: Rank | None = None
        self._later: list[Callable[[], None]] = []
        self._ended: set[int] = set()  # pages whose copy has been made
        numbers = range(shape.num_ranks)
        self.ranks = [new_rank(n, setup_of(n), num_layers, weights) for n in numbers]
        connect_all(self.ranks, lambda number: _Gather(self, number), patience_ns)
        self._register_mapped()
        for rank in self.ranks:
            self._make_balancer(rank)

    def close(self) -> None:
        """Free the machine and all memory."""
        self.machine.close()
        for rank in self.ranks:
            rank.pool.close()
            rank.fabric.close()

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Inside, what hosts launch is written down instead of done."""
        copy, send = torch.Tensor.copy_, Page.send
        is_done = property(lambda page: id(page) in self._ended)

        def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
            return self._copy(target, source) if non_blocking else copy(target, source)

        def sent(page: Page) -> None:
            send(page)
            self._ended.discard(id(page))
            self._later.append(lambda: self._ended.add(id(page)))

        def waited(page: Page) -> None:
            assert not page.used, "a host would wait for its device"

        with ExitStack() as stack:
            self._launches = stack.enter_context(recorded_launches())
            self._seen = 0
            for patch in (
                mock.patch.object(torch.Tensor, "copy_", copied),
                mock.patch.object(Page, "is_done", is_done),
                mock.patch.object(Page, "send", sent),
                mock.patch.object(Page, "wait", waited),
            ):
                stack.enter_context(patch)
            yield
            self.take_launches()

    def dispatch(self, rank: int) -> None:
        """A stand-in for an engine's dispatch, which takes all multiprocessors and waits for peers.

        It is an exchange of rows in memory of its own, whose programs start and end together.
        """
        size, width = len(self.ranks), 4
        if not self._dispatches:
            inboxes = [torch.zeros(inbox_bytes(size, width), dtype=torch.uint8) for _ in self.ranks]
            addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
            for tensor in (*inboxes, addresses):
                self._register(tensor, -1)
            for n in range(size):
                own = Inboxes(addresses, n, new_epoch("cpu"), new_status("cpu"))
                self._dispatches.append((own, torch.full((width,), n, dtype=torch.int32)))
        self.take_launches()
        own, row = self._dispatches[rank]
        exchange(row, own, PATIENCE_NS)
        self.take_launches()
        self._works[-1].gang = True

    @contextmanager
    def of(self, rank: int) -> Iterator[Rank]:
        """Inside, the host of ``rank`` runs."""
        self._current = self.ranks[rank]
        yield self.ranks[rank]
        self.take_launches()
        self._current = None

    def take_launches(self) -> None:
        """Those that were made until now go to the current stream."""
        for launch in self._launches[self._seen :]:
            assert self._current is not None, "nobody launches"
            prepared = prepare(launch, self._change)
            self._kept.append(launch)
            for tensor in prepared.tensors:
                self._register(tensor, self._current.number)
            self.add(Work(self._current.number, set(), launch=prepared))
            self.num_launches += 1
        self._seen = len(self._launches)

    def add(self, work: Work, stream: Stream | None = None) -> int:
        """Work for the end of the current stream of its rank; its number."""
        used = stream or self.ranks[work.rank].stream
        work.before |= used.last
        self._works.append(work)
        used.last = {len(self._works) - 1}
        return len(self._works) - 1

    def call(self, rank: int, action: Callable[[], None], *, aside: bool = False) -> int:
        """The host does ``action`` in stream order; ``aside``: nothing comes behind it."""
        self.take_launches()
        stream = Stream(set(self.ranks[rank].stream.last)) if aside else None
        return self.add(Work(rank, set(), action=action), stream)

    def touch(self, tensor: torch.Tensor, rank: int, what: str, *, writes: bool = False) -> None:
        """Within a call: it accesses ``tensor``, which lies in one piece."""
        if size := tensor.numel() * tensor.element_size():
            self._register(tensor, rank)
            self.machine.touch(tensor.data_ptr(), size, what, writes=writes)

    def gather(self, rank: int, row: torch.Tensor, rows: torch.Tensor) -> None:
        """All ranks' into ``rows`` (R, W); each of them calls this as often."""
        turn = self._gathered[rank]
        self._gathered[rank] += 1
        if turn == len(self._gathers):
            self._gathers.append([])
        taken = self._gathers[turn]

        def give() -> None:
            self.touch(row, rank, "a row that is gathered")
            values[:] = row

        def receive() -> None:
            rows[:] = torch.stack([every for _, every in sorted(taken, key=lambda item: item[0])])
            self.touch(rows, rank, "gathered rows", writes=True)

        values = torch.empty_like(row)
        taken.append((self.call(rank, give), values))
        received = self.call(rank, receive)
        self._works[received].before = {-1 - turn, *self._works[received].before}

    def run(self) -> None:
        """Execute what was written down. Raises MachineError where that does not end."""
        for turn, taken in enumerate(self._gathers):
            for work in self._works:
                if -1 - turn in work.before:
                    work.before = work.before - {-1 - turn} | {number for number, _ in taken}
        ordered = self._in_order()
        launches = [self._works[number].launch for number in ordered]
        self.machine.begin(sum(1 if launch is None else launch.grid for launch in launches))
        for number in ordered:
            work = self._works[number]
            before = [self._numbers[each] for each in work.before]
            if work.launch is not None:
                made = self.machine.launch(work.launch, work.rank, before, gang=work.gang)
            else:
                assert work.action is not None
                made = self.machine.call(work.action, work.rank, before)
            self._numbers[number] = made
        self.machine.run()
        later, self._later = self._later, []
        for action in later:
            action()

    def _in_order(self) -> list[int]:
        """Works that the machine does not have, each behind those before it."""
        first, found = len(self._numbers), list[int]()
        self._numbers += [-1] * (len(self._works) - first)
        waiting, done = list(range(first, len(self._works))), set(range(first))
        while waiting:
            ready = [n for n in waiting if self._works[n].before <= done]
            assert ready, "works wait for each other"
            found += ready
            done |= set(ready)
            waiting = [n for n in waiting if n not in done]
        return found

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        assert self._current is not None, "nobody copies"
        rank = self._current.number

        def action() -> None:
            target.copy_(source)
            self.touch(source, rank, "source of a copy")
            self.touch(target, rank, "target of a copy", writes=True)

        self.call(rank, action)
        self._kept.append((target, source))
        return target

    def _make_balancer(self, rank: Rank) -> None:
        policies: Any = rank.recorder if rank.number == 0 else None
        recorder: Any = rank.recorder
        with mock.patch.object(micro_batch, "SideStream", side_effect=lambda _: _Side(self, rank)):
            given = rank.setup, rank.layers, rank.fabric, policies, recorder, FREE
            rank.balancer = DeviceBalancer(*given)
        rank.balancer._choice._own_time.picoseconds = measured_picoseconds(rank.number)

    def _register_mapped(self) -> None:
        """Memory that the driver has mapped, some of it several times."""
        cells: dict[int, int] = {}
        for rank in self.ranks:
            for address, (size, memory) in rank.driver.mapped.items():
                if memory not in cells:
                    cells[memory] = self.machine.new_cells(size, _BYTE)
                self.machine.add_memory(address, size, rank.number, cells[memory], _BYTE)
                insort(self._known, (address, address + size))

    def _register(self, tensor: torch.Tensor, rank: int) -> None:
        """A tensor's memory, when it is first passed."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        place = bisect_right(self._known, start, key=itemgetter(0))
        if not size or (place and start < self._known[place - 1][1]):
            return
        self._kept.append(tensor)
        self._known.insert(place, (start, start + size))
        self.machine.add_memory(start, size, rank, self.machine.new_cells(size))
