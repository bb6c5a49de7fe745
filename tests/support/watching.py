"""Ranks in processes of their own that do nothing but watch each other, and links of hosts."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.namespaces import Hosts, enter_network
from tests.support.ring_files import create
from tests.support.waiting import until
from ultraep_serve.balance.host_link import HostLink, StageMeeting, join_hosts
from ultraep_serve.balance.watch import RankWatch
from ultraep_serve.system.topology import Location, PipelineStage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape

TIMEOUT = 2.0
LIMIT = TIMEOUT + 1.0  # of silence, with the step by which a heartbeat is seen late
LONG = 60.0  # a timeout that is not waited for
SLACK = 10.0  # beyond the timeout, by when every process must have ended
ON_ONE_HOST = Location.on_one_host(0, 2)


def halve_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats, and all times that hang on them, here and in ranks."""
    monkeypatch.setattr("ultraep_serve.telemetry.recorder.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("ultraep_serve.balance.watch._LONGEST_STEP", 1.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._QUIET_SECONDS", 2.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 1.0)
    monkeypatch.setattr("ultraep_serve.balance.host_link._MEET_SECONDS", 1.5)


def gathering(board: Path, rank: int, num_ranks: int) -> Callable[[np.ndarray], np.ndarray]:
    """All-gather through files, where processes have no group."""
    calls = iter(range(100))

    def gather(row: np.ndarray) -> np.ndarray:
        call = next(calls)
        np.save(board / f"part-{call}-{rank}.npy", row)
        (board / f"part-{call}-{rank}.npy").rename(board / f"{call}-{rank}.npy")
        files = [board / f"{call}-{other}.npy" for other in range(num_ranks)]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        return np.stack([np.load(file) for file in files])

    return gather


def serve(
    board: Path,
    number: int,
    hosts: Hosts | None,
    num_ranks: int,
    host_size: int,
    num_stages: int,
    timeout: float,
) -> None:
    """A rank that does nothing but watch, and what signals tell it to.

    Stages lie on ``hosts``, if there are any, one on each. Its batches go on while there is a
    file ``batches``.
    """
    stage, rank = divmod(number, num_ranks)
    location, pipeline = (
        Location(rank, num_ranks, host_size, host_size),
        PipelineStage(stage, num_stages),
    )
    host = stage if hosts is not None and num_stages > 1 else rank // host_size
    if hosts is not None:
        enter_network(hosts.names[host])
    home = board / f"host-{host}"
    home.mkdir(exist_ok=True)
    shape = ExpertShape(num_ranks, 8, 1)
    recorder = create(home, rank, shape, location, pipeline, num_layers=1, timeout_seconds=timeout)
    Finalize(None, recorder.close, exitpriority=1)
    link = meeting = None
    address = hosts.addresses[0] if hosts else "127.0.0.1"
    if num_stages > 1:
        store = dist.FileStore(str(board / "store"))
        meeting = StageMeeting(store, number, num_ranks * num_stages, host, address)
    if host_size < num_ranks:
        link = join_hosts(location, address, gathering(board, rank, num_ranks))
    recorder.set_state(RingState.READY)
    watch = RankWatch(home, location, timeout, LONG, recorder, link, pipeline, meeting)
    recorder.at_heartbeat(watch.look)
    Finalize(None, watch.close, exitpriority=2)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, compute)
    signal.signal(signal.SIGUSR2, fail)
    (board / f"up-{number}").touch()
    while True:
        time.sleep(0.1)
        if (board / "batches").exists():
            recorder.count_batch(Decision.SMALL)


def stop(*_: object) -> None:
    raise SystemExit


def compute(*_: object) -> None:
    sum(range(10**15))  # lets no other thread run Python


def fail(*_: object) -> None:
    raise RuntimeError("out of memory")


@contextmanager
def ranks(
    board: Path,
    num_ranks: int,
    hosts: Hosts | None = None,
    host_size: int = 0,
    num_stages: int = 1,
    timeout: float = TIMEOUT,
) -> Iterator[list[BaseProcess]]:
    """Their processes, once all watch; none outlives the block."""
    fork, size = multiprocessing.get_context("fork"), host_size or num_ranks
    numbers = range(num_ranks * num_stages)
    children: list[BaseProcess] = [
        fork.Process(target=serve, args=(board, each, hosts, num_ranks, size, num_stages, timeout))
        for each in numbers
    ]
    try:
        for child in children:
            child.start()
        until(lambda: all((board / f"up-{each}").exists() for each in numbers), 20.0)
        yield children
    finally:
        for child in children:
            child.kill()
            child.join()


def tell(child: BaseProcess, number: signal.Signals) -> None:
    assert child.pid is not None
    os.kill(child.pid, number)


def unheard(board: Path, rank: int, host_size: int) -> str:
    reader = RingReader(RunFiles(board / f"host-{rank // host_size}").ring(rank))
    try:
        return reader.header().unheard
    finally:
        reader.close()


def pair() -> tuple[HostLink, HostLink]:
    links = HostLink("127.0.0.1", 0, 2), HostLink("127.0.0.1", 1, 2)
    endpoints = np.stack([link.endpoint for link in links])
    for link in links:
        link.join(endpoints)
    return links


def looks(watch: RankWatch, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second, by a clock of its own."""
    with monkeypatch.context() as patch:
        clock = count(watch._looked + 1)
        patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
        for _ in range(seconds):
            watch.look()
