"""Hosts watch each other through the engine's store: who is cut off, who is shown, and who ends."""

import os
import signal
import subprocess
import threading
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ring_files import create
from tests.support.waiting import until
from ultraep_serve.balance.watch import HostBeats, Watch
from ultraep_serve.errors import OutputError
from ultraep_serve.system.topology import ONLY_STAGE, Location, is_process_alive, process_state
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultraep_serve.telemetry.recorder.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("ultraep_serve.balance.watch.HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr("ultraep_serve.balance.watch._LONGEST_STEP", 1.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._QUIET_SECONDS", 2.0)
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.5)


def recorder_of(home: Path) -> Recorder:
    shape, location = ExpertShape(2, 8, 1), Location(0, 2, 1, 1)
    return create(home, 0, shape, location, num_layers=1)


def unheard(home: Path) -> str:
    with closing(RingReader(RunFiles(home).ring(0))) as reader:
        return reader.header().unheard


def test_a_silent_host_is_shown_and_ends_this_one(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while batches go on, which need its ranks, and not where it is heard again in time."""
    ended: list[int] = []
    heard = {(0, 1): "7 host other (rank 1)"}
    with closing(recorder_of(run_path)) as recorder, monkeypatch.context() as patch:
        beats: Any = SimpleNamespace(heard=heard)
        watch = Watch(RunFiles(run_path), recorder, 4.0, os.getpid(), beats, end=ended.append)
        clock = count(int(watch._looked) + 2)  # whole seconds
        patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
        for _ in range(10):
            recorder.count_batch(Decision.SMALL)
            watch.look()
            assert unheard(run_path) == ""
        watch.look()
        assert unheard(run_path) == ""
        for _ in range(3):
            watch.look()
            assert "host other (rank 1) was not heard for" in unheard(run_path)
        heard[0, 1] = "8 host other (rank 1)"
        for shown in ("", "", "was not heard for 2 s", "was not heard for 3 s"):
            watch.look()
            assert shown in unheard(run_path)
            assert bool(shown) == bool(unheard(run_path))
        watch.look()
        assert not ended
        watch.look()
    assert ended
    assert RunFiles(run_path).lost_reason() == (
        "host other (rank 1) was not heard for 5 s; restart the engine on all hosts"
    )


def test_its_own_pause_is_not_the_silence_of_others(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspend: the clock has jumped, and nobody could be heard meanwhile."""
    ended: list[int] = []
    beats: Any = SimpleNamespace(heard={(0, 1): "7 host other (rank 1)"})
    with closing(recorder_of(run_path)) as recorder:
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
    with closing(recorder_of(run_path)) as recorder:
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
    with closing(recorder_of(run_path)) as recorder:
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
    with closing(recorder_of(run_path)) as recorder:
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
            assert unheard(run_path) == ""
            waits.append(True)
            watch.look()
            assert unheard(run_path) == "rank 1 has died"
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
