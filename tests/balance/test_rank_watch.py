"""RankWatch in processes of its own: who stops, dies or is cut off, and who is given up for it."""

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.namespaces import Hosts, enter_network, two_namespaces
from ultraep_serve.balance.host_link import HostLink, Message, StageMeeting, join_hosts
from ultraep_serve.balance.topology import Location, PipelineStage
from ultraep_serve.balance.watch import RankWatch
from ultraep_serve.errors import OutputError
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import RingState
from ultraep_serve.types import Decision, ExpertShape

TIMEOUT = 2.0
LIMIT = TIMEOUT + 1.0  # of silence, with the step by which a heartbeat is seen late
LONG = 60.0  # a timeout that is not waited for
SLACK = 10.0  # beyond the timeout, by when every process must have ended
ON_ONE_HOST = Location.on_one_host(0, 2)


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    recorder = Recorder.create(
        home, rank, shape, 1, 4, "test", "data", 0, timeout, location, pipeline
    )
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


def is_running(child: BaseProcess) -> bool:
    return child.is_alive()


def until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


def unheard(board: Path, rank: int, host_size: int) -> str:
    reader = RingReader(RunFiles(board / f"host-{rank // host_size}").ring(rank))
    try:
        return reader.header().unheard
    finally:
        reader.close()


def test_a_rank_stopped_for_less_is_waited_for_and_for_longer_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 3) as (first, second, third):
        tell(second, signal.SIGSTOP)
        time.sleep(TIMEOUT / 2)
        tell(second, signal.SIGCONT)
        time.sleep(TIMEOUT)
        assert all(map(is_running, (first, second, third)))
        assert unheard(run_path, 0, 3) == ""
        tell(second, signal.SIGSTOP)
        until(lambda: not is_running(first) and not is_running(third), TIMEOUT + SLACK)
        assert is_running(second)
        assert RunFiles(run_path / "host-0").lost_reason().startswith("rank 1 was not heard for ")
        assert "rank 1 was not heard" in unheard(run_path, 0, 3)
        tell(second, signal.SIGCONT)
        until(lambda: not is_running(second), SLACK)


def test_a_killed_rank_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 2) as (first, second):
        tell(second, signal.SIGKILL)
        until(lambda: not is_running(first), TIMEOUT + SLACK)
        assert "rank 1" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_that_left_is_not_missed(run_path: Path) -> None:
    shape = ExpertShape(2, 8, 1)
    with ExitStack() as stack:
        recorders = []
        for rank in range(2):
            made = Recorder.create(run_path, rank, shape, 1, 4, "test", "data", 0, 1.0)
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
    recorder = Recorder.create(run_path, 0, shape, 1, 4, "test", "data", 0, 10.0)
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

    recorder = Recorder.create(run_path, 0, ExpertShape(2, 8, 1), 1, 4, "test", "data", 0, 10.0)
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


def pair() -> tuple[HostLink, HostLink]:
    links = HostLink("127.0.0.1", 0, 2), HostLink("127.0.0.1", 1, 2)
    cards = np.stack([link.card for link in links])
    for link in links:
        link.know(cards)
    return links


def test_datagrams_of_strangers_are_ignored() -> None:
    first, second = pair()
    good = {"host": 1, "unheard": [], "quiet": [], "lost": "", "leaves": False}
    bad: list[object] = [[], 7, None, {}, good | {"host": 9}, good | {"host": 0}]
    bad += [good | {"unheard": 3}, good | {"quiet": ["x"]}, good | {"host": 1e400}]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        target = second.addresses[0]
        stranger.sendto(b"", target)
        stranger.sendto(b"\0" * 16 + json.dumps(good | {"lost": "forged"}).encode(), target)
        stranger.sendto(first.token, target)
        stranger.sendto(first.token + b"[" * 60000, target)
        for content in bad:
            stranger.sendto(first.token + json.dumps(content).encode(), target)
        stranger.sendto(first.token + json.dumps(good | {"lost": "a\x1b\nb"}).encode(), target)
        time.sleep(0.2)
        assert [message.lost for message in first.receive()] == ["ab"]
    for link in (first, second):
        link.close()


def test_hosts_hear_each_other_or_do_without(caplog: pytest.LogCaptureFixture) -> None:
    first, second = pair()
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(second.hears_all()))
    thread.start()
    assert first.hears_all()
    thread.join()
    assert heard == [True]
    second.close()
    list(first.receive())  # what was on its way
    assert not first.hears_all()
    first.close()

    def gather(row: np.ndarray) -> np.ndarray:
        return np.stack([row, row])  # the other host's datagrams go nowhere

    assert join_hosts(Location(0, 2, 1, 1), "no.such.host.invalid", gather) is None
    assert "UDP does not pass" in caplog.text


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_namespaces() as made:
        yield made


def test_batches_that_go_on_are_heard_where_datagrams_are_not(run_path: Path, hosts: Hosts) -> None:
    (run_path / "batches").touch()
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut()
        time.sleep(LIMIT + 2)
        assert all(map(is_running, children))
        assert [unheard(run_path, rank, 1) for rank in (0, 1)] == ["", ""]
        (run_path / "batches").unlink()
        time.sleep(LIMIT)
        assert [unheard(run_path, rank, 1) for rank in (0, 1)] == ["", ""]
        assert all(map(is_running, children))


def test_a_cut_link_is_shown_and_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        hosts.cut()
        until(lambda: all("not heard" in unheard(run_path, rank, 2) for rank in (0, 2)), 10.0)
        until(lambda: not any(map(is_running, children)), TIMEOUT + SLACK)
    for host, other in enumerate(reversed(hosts.addresses)):
        assert f"host {other} (ranks " in RunFiles(run_path / f"host-{host}").lost_reason()


def test_a_link_that_comes_back_ends_nothing(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut()
        until(lambda: "not heard" in unheard(run_path, 0, 1), 10.0)
        hosts.join()
        until(lambda: not any(unheard(run_path, rank, 1) for rank in (0, 1)), 5.0)
        time.sleep(TIMEOUT)
        assert all(map(is_running, children))


def test_a_link_cut_one_way_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut_one_way()
        until(lambda: "does not hear this host" in unheard(run_path, 0, 1), 10.0)
        until(lambda: not any(map(is_running, children)), TIMEOUT + SLACK)
    assert f"host {hosts.addresses[0]}" in RunFiles(run_path / "host-1").lost_reason()
    assert f"host {hosts.addresses[1]}" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_stopped_elsewhere_ends_this_host(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        tell(children[3], signal.SIGSTOP)
        until(lambda: "rank 3 stands still" in unheard(run_path, 0, 2), 10.0)
        until(lambda: not any(map(is_running, children[:3])), TIMEOUT + SLACK)
    assert "rank 3 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def looks(watch: RankWatch, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a second, by a clock of its own."""
    with monkeypatch.context() as patch:
        clock = count(watch._looked + 1)
        patch.setattr("ultraep_serve.balance.watch.time.monotonic", lambda: next(clock))
        for _ in range(seconds):
            watch.look()


def test_a_host_whose_batches_ended_with_its_datagrams_is_given_up(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, (first, second) = Location(0, 2, 1, 1), pair()
    ended: list[int] = []
    recorder = Recorder.create(run_path, 0, ExpertShape(2, 8, 1), 1, 4, "test", "data", 0, 5.0)
    watch = RankWatch(run_path, location, 5.0, LONG, recorder, first, end=ended.append)
    for _ in range(4):
        looks(watch, 1, monkeypatch)
        recorder.count_batch(Decision.SMALL)
    looks(watch, 6, monkeypatch)
    assert not ended
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.0)
    looks(watch, 2, monkeypatch)
    assert ended
    for each in (recorder, first, second):
        each.close()


def test_a_rank_that_computes_is_slow_and_one_that_stands_still_is_lost(run_path: Path) -> None:
    """Also the first of a host, for which the next one speaks."""
    with ranks(run_path, 4, host_size=2) as children:
        tell(children[2], signal.SIGUSR1)
        until(lambda: "rank 2 stands still" in unheard(run_path, 0, 2), 10.0)
        time.sleep(LIMIT - 1)
        assert all(map(is_running, children))
        assert "rank 2 not heard" in unheard(run_path, 3, 2)
        tell(children[2], signal.SIGSTOP)
        others = [children[rank] for rank in (0, 1, 3)]
        until(lambda: not any(map(is_running, others)), TIMEOUT + SLACK)
    assert "rank 2 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_that_computes_for_ever_is_given_up(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process is the one that computes: rank 1's heart is not waited for."""
    ended: list[int] = []
    shape = ExpertShape(2, 8, 1)
    recorders = [
        Recorder.create(run_path, rank, shape, 1, 4, "test", "data", 0, 5.0) for rank in (0, 1)
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


def test_a_rank_that_fails_is_lost_at_once(run_path: Path) -> None:
    with ranks(run_path, 4, host_size=2, timeout=LONG) as children:
        tell(children[3], signal.SIGUSR2)
        until(lambda: not any(map(is_running, children)), SLACK)
    error = "rank 3 failed: RuntimeError: out of memory"
    assert RunFiles(run_path / "host-1").lost_reason().startswith(error)
    assert (
        f"host 127.0.0.1 (ranks 2 to 3) ended: {error}"
        in RunFiles(run_path / "host-0").lost_reason()
    )


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
    recorder = Recorder.create(run_path, 0, ExpertShape(2, 8, 1), 1, 4, "test", "data", 0, 10.0)
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


def test_a_host_whose_only_rank_fails_says_so_itself(run_path: Path) -> None:
    with ranks(run_path, 2, host_size=1, timeout=LONG) as children:
        tell(children[0], signal.SIGUSR2)
        until(lambda: not any(map(is_running, children)), SLACK)
    assert "ended: rank 0 failed: RuntimeError" in RunFiles(run_path / "host-1").lost_reason()


def test_failures_after_a_stop_are_its_consequence(run_path: Path) -> None:
    with ranks(run_path, 4, host_size=2, timeout=LONG) as children:
        tell(children[2], signal.SIGTERM)
        until(lambda: not is_running(children[2]), SLACK)
        time.sleep(1.0)
        tell(children[3], signal.SIGUSR2)
        tell(children[1], signal.SIGUSR2)
        until(lambda: not is_running(children[3]) and not is_running(children[1]), SLACK)
        time.sleep(LIMIT)
        assert is_running(children[0])
        assert unheard(run_path, 0, 2).startswith("rank 1 not heard")


def test_stages_on_a_host_watch_each_other(run_path: Path) -> None:
    with ranks(run_path, 1, num_stages=2) as children:
        tell(children[1], signal.SIGSTOP)
        until(lambda: not is_running(children[0]), TIMEOUT + SLACK)
    assert "rank 0 of pipeline stage 1 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def test_stages_on_two_hosts_watch_each_other(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 1, hosts, num_stages=2) as children:
        links = [run_path / f"host-{host}" / "link" for host in (0, 1)]
        until(lambda: all(link.exists() for link in links), SLACK)
        time.sleep(2.0)  # both were heard
        hosts.cut()
        until(lambda: "not heard" in unheard(run_path, 0, 1), SLACK)
        until(lambda: not any(map(is_running, children)), TIMEOUT + SLACK)
    for host, other in enumerate(reversed(hosts.addresses)):
        name = f"host {other} (rank 0" + " of pipeline stage 1" * (host == 0)
        assert name in RunFiles(run_path / f"host-{host}").lost_reason()


def test_a_stage_that_was_never_heard_is_not_missed(run_path: Path, hosts: Hosts) -> None:
    hosts.cut()
    with ranks(run_path, 1, hosts, num_stages=2) as children:
        until((run_path / "host-0" / "link").exists, SLACK)
        time.sleep(LIMIT + 2.0)
        assert all(map(is_running, children))


def test_heartbeats_of_512_hosts_wait_for_a_look() -> None:
    """With what Linux sets aside for anybody."""
    link = HostLink("127.0.0.1", 0, 512)
    link.know(np.stack([link.card] * 512))
    target = "127.0.0.1", int(link.card[-1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as others:
        for host in range(1, 512):
            message = Message(host, [], [], "", False)
            others.sendto(link.token + json.dumps(message._asdict()).encode(), target)
    assert {message.host for message in link.receive()} == set(range(1, 512))
    link.close()
