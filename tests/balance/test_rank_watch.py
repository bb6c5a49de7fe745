"""RankWatch on one host, in processes of its own: who stops or dies, and who is given up."""

import signal
import threading
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.ring_files import create
from tests.support.waiting import until
from tests.support.watching import (
    LONG,
    ON_ONE_HOST,
    SLACK,
    TIMEOUT,
    halve_times,
    looks,
    ranks,
    tell,
    unheard,
)
from ultraep_serve.balance.watch import RankWatch
from ultraep_serve.errors import OutputError
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_times(monkeypatch)


def test_a_rank_stopped_for_less_is_waited_for_and_for_longer_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 3) as (first, second, third):
        tell(second, signal.SIGSTOP)
        time.sleep(TIMEOUT / 2)
        tell(second, signal.SIGCONT)
        time.sleep(TIMEOUT)
        assert all(map(BaseProcess.is_alive, (first, second, third)))
        assert unheard(run_path, 0, 3) == ""
        tell(second, signal.SIGSTOP)
        until(lambda: not first.is_alive() and not third.is_alive(), TIMEOUT + SLACK)
        assert second.is_alive()
        assert RunFiles(run_path / "host-0").lost_reason().startswith("rank 1 was not heard for ")
        assert "rank 1 was not heard" in unheard(run_path, 0, 3)
        tell(second, signal.SIGCONT)
        until(lambda: not second.is_alive(), SLACK)


def test_a_killed_rank_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 2) as (first, second):
        tell(second, signal.SIGKILL)
        until(lambda: not first.is_alive(), TIMEOUT + SLACK)
        assert "rank 1" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_that_left_is_not_missed(run_path: Path) -> None:
    shape = ExpertShape(2, 8, 1)
    with ExitStack() as stack:
        recorders = []
        for rank in range(2):
            made = create(run_path, rank, shape, num_layers=1, timeout_seconds=1.0)
            stack.callback(made.close)
            recorders.append(made)
        watch = RankWatch(run_path, ON_ONE_HOST, 0.1, 0.1, recorders[0], end=lambda code: None)
        watch.look()
        recorders[1].close()
        for _ in range(4):
            time.sleep(0.5)
            watch.look()
        assert RunFiles(run_path).lost_reason() == ""


def test_its_own_pause_is_not_the_silence_of_others(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspend: the clock has jumped, and nobody could be heard meanwhile."""
    shape = ExpertShape(2, 8, 1)
    recorder = create(run_path, 0, shape, num_layers=1, timeout_seconds=10.0)
    ended: list[int] = []
    watch = RankWatch(run_path, ON_ONE_HOST, 10.0, LONG, recorder, end=ended.append)
    now = time.monotonic()
    clock = iter([now + 1, now + 3601, now + 3602])
    with monkeypatch.context() as patch:
        patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
        for _ in range(3):
            watch.look()
    recorder.close()
    assert ended == []
    assert RunFiles(run_path).lost_reason() == ""


@pytest.mark.parametrize("wrong", ["no room", "nobody reads the log"])
def test_a_rank_ends_also_where_it_cannot_say_why(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def no_room(*_: object) -> None:
        raise OutputError("no space left")

    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=10.0)
    (run_path / "lost").write_text("rank 1 was not heard")
    has_ended = threading.Event()
    watch = RankWatch(run_path, ON_ONE_HOST, 10.0, LONG, recorder, end=lambda _: has_ended.set())
    with monkeypatch.context() as patch:
        patch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.2)
        if wrong == "no room":
            patch.setattr(RunFiles, "give_up", no_room)
        else:
            patch.setattr("sys.stderr", SimpleNamespace(write=lambda _: has_ended.wait(10)))
        threading.Thread(target=watch.look, daemon=True).start()
        assert has_ended.wait(5)
    recorder.close()


def test_a_rank_that_computes_for_ever_is_given_up(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is the one that computes: rank 1's heart is not waited for."""
    ended: list[int] = []
    shape = ExpertShape(2, 8, 1)
    recorders = [
        create(run_path, rank, shape, num_layers=1, timeout_seconds=5.0) for rank in (0, 1)
    ]
    recorders[1]._stopping.set()
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.0)
    watch = RankWatch(run_path, ON_ONE_HOST, 5.0, LONG, recorders[0], end=ended.append)
    looks(watch, 55, monkeypatch)
    assert not ended
    looks(watch, 10, monkeypatch)
    assert ended
    assert "rank 1 was not heard for 61 s" in RunFiles(run_path).lost_reason()
    for recorder in recorders:
        recorder.close()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SystemExit(), RingState.STOPPED),
        (SystemExit(128 + signal.SIGTERM), RingState.STOPPED),
        (KeyboardInterrupt(), RingState.STOPPED),
        (SystemExit(1), RingState.FAILED),
        (ValueError("not in\none line"), RingState.FAILED),
    ],
)
def test_an_exit_that_was_asked_for_is_no_failure(
    run_path: Path, error: BaseException, state: RingState
) -> None:
    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=10.0)
    watch = RankWatch(run_path, ON_ONE_HOST, 10.0, LONG, recorder)

    def end() -> None:
        try:
            raise error
        finally:
            watch.close()
            recorder.close()

    with pytest.raises(type(error)):
        end()
    reader = RingReader(RunFiles(run_path).ring(0))
    assert reader.header().state is state
    assert reader.header().unheard in ("", "SystemExit: 1", "ValueError: not in one line")
    reader.close()
