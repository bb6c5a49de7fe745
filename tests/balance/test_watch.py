"""Hosts watch each other through the engine's store: who is cut off, who is shown, and who ends."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.namespaces import Hosts, enter_network, two_namespaces
from tests.support.ring_files import create
from tests.support.waiting import until
from ultraep_serve.balance.watch import HostBeats, Watch
from ultraep_serve.errors import OutputError
from ultraep_serve.system.topology import ONLY_STAGE, Location, is_process_alive, process_state
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape

TIMEOUT = 2.0
SLACK = 10.0  # beyond the timeout, by when every process must have ended
PORT = 29_500  # in a network of its own


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultraep_serve.telemetry.recorder.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("ultraep_serve.balance.watch.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("ultraep_serve.balance.watch._LONGEST_STEP", 1.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._QUIET_SECONDS", 2.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.5)


def recorder_of(home: Path, rank: int) -> Recorder:
    home.mkdir(exist_ok=True)
    location = Location(rank, 2, 1, 1)
    return create(home, rank, ExpertShape(2, 8, 1), location, num_layers=1, timeout_seconds=TIMEOUT)


def serve(board: Path, rank: int, hosts: Hosts) -> None:
    """The only rank of a host, whose batches go on while there is a file ``batches``."""
    enter_network(hosts.names[rank])
    store = dist.TCPStore(hosts.addresses[0], PORT, is_master=rank == 0, wait_for_workers=False)
    home = board / f"host-{rank}"
    recorder = recorder_of(home, rank)
    beats: Any = HostBeats(store, Location(rank, 2, 1, 1), ONLY_STAGE)
    recorder.at_heartbeat(Watch(RunFiles(home), recorder, TIMEOUT, os.getpid(), beats).look)
    until(lambda: beats.heard, 20.0)
    recorder.set_state(RingState.READY)
    (board / f"up-{rank}").touch()
    while True:
        time.sleep(0.1)
        if (board / "batches").exists():
            recorder.count_batch(Decision.SMALL)


@contextmanager
def two_hosts(board: Path, hosts: Hosts) -> Iterator[list[BaseProcess]]:
    """Their processes, once they hear each other; none outlives the block."""
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=serve, args=(board, rank, hosts)) for rank in range(2)]
    try:
        for child in children:
            child.start()
        until(lambda: all((board / f"up-{rank}").exists() for rank in range(2)), 30.0)
        yield list(children)
    finally:
        for child in children:
            child.kill()
            child.join()


def unheard(board: Path, rank: int, home: str = "host-{}") -> str:
    with closing(RingReader(RunFiles(board / home.format(rank)).ring(rank))) as reader:
        return reader.header().unheard


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_namespaces() as made:
        yield made


def test_a_cut_link_is_shown_and_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with two_hosts(run_path, hosts) as children:
        hosts.cut()
        until(lambda: all("not heard" in unheard(run_path, rank) for rank in range(2)), 10.0)
        until(lambda: not any(map(BaseProcess.is_alive, children)), TIMEOUT + SLACK)
    for rank in range(2):
        reason = RunFiles(run_path / f"host-{rank}").lost_reason()
        assert f"(rank {1 - rank}) was not heard for" in reason
        assert reason.endswith("restart the engine on all hosts")


def test_a_link_that_comes_back_ends_nothing(
    run_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.TIMEOUT", 30.0)  # TCP sends again ever more seldom
    with two_hosts(run_path, hosts) as children:
        hosts.cut()
        until(lambda: "not heard" in unheard(run_path, 0), 10.0)
        hosts.join()
        until(lambda: not any(unheard(run_path, rank) for rank in range(2)), 25.0)
        assert all(map(BaseProcess.is_alive, children))


def test_batches_that_go_on_are_heard_where_beats_are_not(run_path: Path, hosts: Hosts) -> None:
    (run_path / "batches").touch()
    with two_hosts(run_path, hosts) as children:
        hosts.cut()
        time.sleep(2 * TIMEOUT + 1)
        assert all(map(BaseProcess.is_alive, children))
        assert [unheard(run_path, rank) for rank in range(2)] == ["", ""]


def test_its_own_pause_is_not_the_silence_of_others(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspend: the clock has jumped, and nobody could be heard meanwhile."""
    ended: list[int] = []
    beats: Any = SimpleNamespace(heard={(0, 1): "7 host other (rank 1)"})
    with closing(recorder_of(run_path, 0)) as recorder:
        watch = Watch(RunFiles(run_path), recorder, 10.0, os.getpid(), beats, end=ended.append)
        clock = iter([watch._looked + 1, watch._looked + 3601, watch._looked + 3602])
        with monkeypatch.context() as patch:
            patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
            for _ in range(3):
                watch.look()
        assert not ended
        clock = count(watch._looked + 1)
        with monkeypatch.context() as patch:
            patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
            for _ in range(12):
                watch.look()
        assert ended


@pytest.mark.parametrize("wrong", ["nothing", "no room", "nobody reads the log"])
def test_a_rank_ends_with_another_one_of_its_host(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Also where it cannot say why."""

    def no_room(*_: object) -> None:
        raise OutputError("no space left")

    has_ended = threading.Event()
    (run_path / "lost").write_text("host other was not heard")
    with closing(recorder_of(run_path, 0)) as recorder:
        files, end = RunFiles(run_path), lambda _: has_ended.set()
        watch = Watch(files, recorder, 10.0, os.getpid(), end=end)
        with monkeypatch.context() as patch:
            if wrong == "no room":
                patch.setattr(RunFiles, "give_up", no_room)
            elif wrong == "nobody reads the log":
                patch.setattr("sys.stderr", SimpleNamespace(write=lambda _: has_ended.wait(10)))
            threading.Thread(target=watch.look, daemon=True).start()
            assert has_ended.wait(5)


def test_a_rank_shows_that_the_engines_first_process_is_stopped_and_ends_with_it(
    run_path: Path,
) -> None:
    ended: list[int] = []
    with closing(recorder_of(run_path, 0)) as recorder:
        unseen = subprocess.Popen(["true"])  # as one of another process namespace
        unseen.wait()
        Watch(RunFiles(run_path), recorder, 10.0, unseen.pid, end=ended.append).look()
        assert not ended
        first = subprocess.Popen(["sleep", "60"])
        watch = Watch(RunFiles(run_path), recorder, 10.0, first.pid, end=ended.append)
        reader = RingReader(RunFiles(run_path).ring(0))
        for number, state, shown in (
            (signal.SIGSTOP, "T", f"the engine's process {first.pid} is stopped"),
            (signal.SIGCONT, "S", ""),
        ):
            first.send_signal(number)
            until(lambda state=state: process_state(first.pid)[0] == state, 10.0)  # type: ignore[misc]
            watch.look()
            assert reader.header().unheard == shown
        reader.close()
        assert not ended
        first.kill()
        until(lambda: not is_process_alive(first.pid), 10.0)  # nobody has waited for it yet
        watch.look()
        first.wait()
    assert ended
    assert not RunFiles(run_path).lost_reason()  # ranks of another server go on


def test_a_rank_ends_after_one_that_its_kernels_wait_for(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: where an engine ends all of its ranks, they end one after another."""
    ended: list[int] = []
    waits: list[bool] = []
    clock = count(time.monotonic())
    neighbour = subprocess.Popen(["sleep", "60"])
    with closing(recorder_of(run_path, 0)) as recorder:
        processes = {0: os.getpid(), 1: neighbour.pid, 2: 0}
        watch = Watch(
            RunFiles(run_path),
            recorder,
            10.0,
            os.getpid(),
            None,
            processes,
            is_waiting=lambda: bool(waits),
            end=ended.append,
        )
        with monkeypatch.context() as patch:
            patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
            watch.look()
            neighbour.kill()
            neighbour.wait()
            for _ in range(10):  # as where that rank's program has come to its end
                watch.look()
            assert unheard(run_path, 0, "") == ""
            waits.append(True)
            watch.look()
            assert unheard(run_path, 0, "") == "rank 1 has died"
            assert not ended
            for _ in range(5):
                watch.look()
    assert ended
    assert RunFiles(run_path).lost_reason() == "rank 1 has died; restart the engine"


class Failing:
    """A store of torch's whose connections break as often as it is told."""

    def __init__(self) -> None:
        self.values = {"ultraep-beat-0-1": "1 host other (rank 1)"}
        self.clones = 0
        self.breaks = ["clone", "set", "get"]  # in this order, once each

    def _fails(self, name: str) -> None:
        if self.breaks[:1] == [name]:
            del self.breaks[0]
            raise RuntimeError(f"{name}: connection reset by peer")

    def clone(self) -> "Failing":
        self.clones += 1
        self._fails("clone")
        return self

    def set(self, key: str, value: str) -> None:
        self._fails("set")
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.values

    def get(self, key: str) -> bytes:
        self._fails("get")
        return self.values[key].encode()


def test_beats_go_on_by_a_new_connection_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultraep_serve.balance.watch.HEARTBEAT_SECONDS", 0.01)
    store = Failing()
    beats = HostBeats(store, Location(0, 2, 1, 1), ONLY_STAGE)
    until(lambda: beats.heard == {(0, 1): "1 host other (rank 1)"}, 10.0)
    assert (store.breaks, store.clones) == ([], 4)
    own = store.values["ultraep-beat-0-0"]
    until(lambda: store.values["ultraep-beat-0-0"] != own, 10.0)
    beats.stop()
    until(lambda: "ultraep-beats" not in [each.name for each in threading.enumerate()], 10.0)
