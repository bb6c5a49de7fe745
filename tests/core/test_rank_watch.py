"""RankWatch in processes of its own: who stops, dies or is cut off, and who is given up for it."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.namespaces import Hosts, enter_network, two_namespaces
from ultraep_serve.errors import OutputError
from ultraep_serve.ring.reader import RingReader
from ultraep_serve.ring.recorder import Recorder
from ultraep_serve.ring.run_directory import LOST_FILE, lost_reason
from ultraep_serve.ring.schema import RingState, ring_path
from ultraep_serve.topology import Location
from ultraep_serve.types import ExpertShape
from ultraep_serve.watch import HostLink, RankWatch, join_hosts

TIMEOUT = 4.0
SLACK = 10.0  # beyond the timeout, by when every process must have ended


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


def serve(board: Path, rank: int, hosts: Hosts | None, num_ranks: int, host_size: int) -> None:
    """A rank that does nothing but watch."""
    location = Location(rank, num_ranks, host_size, host_size)
    host = rank // host_size
    if hosts is not None:
        enter_network(hosts.names[host])
    home = board / f"host-{host}"
    home.mkdir(exist_ok=True)
    recorder = Recorder.create(
        home, rank, ExpertShape(num_ranks, 8, 1), 1, 4, "test", "data", 0, TIMEOUT, location
    )
    link = None
    if hosts is not None:
        link = join_hosts(location, hosts.addresses[0], gathering(board, rank, num_ranks))
    recorder.set_state(RingState.READY)
    recorder.at_heartbeat(RankWatch(home, location, TIMEOUT, recorder, link).look)
    (board / f"up-{rank}").touch()
    signal.pause()


@contextmanager
def ranks(
    board: Path, num_ranks: int, hosts: Hosts | None = None, host_size: int = 0
) -> Iterator[list[int]]:
    """Their process ids, once all watch; none outlives the block."""
    children: list[int] = []
    for rank in range(num_ranks):
        if not (child := os.fork()):
            try:
                serve(board, rank, hosts, num_ranks, host_size or num_ranks)
            finally:
                os._exit(3)
        children.append(child)
    try:
        until(lambda: all((board / f"up-{rank}").exists() for rank in range(num_ranks)), 20.0)
        yield children
    finally:
        for child in children:
            if is_running(child):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


_ended: dict[int, int] = {}


def is_running(child: int) -> bool:
    if child in _ended:
        return False
    found, status = os.waitpid(child, os.WNOHANG)
    if found:
        _ended[child] = status
    return not found


def until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


def unheard(board: Path, rank: int, host_size: int) -> str:
    reader = RingReader(ring_path(board / f"host-{rank // host_size}", rank))
    try:
        return reader.header().unheard
    finally:
        reader.close()


def test_a_rank_stopped_for_less_is_waited_for_and_for_longer_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 3) as (first, second, third):
        os.kill(second, signal.SIGSTOP)
        time.sleep(TIMEOUT / 2)
        os.kill(second, signal.SIGCONT)
        time.sleep(TIMEOUT)
        assert all(map(is_running, (first, second, third)))
        assert unheard(run_path, 0, 3) == ""
        os.kill(second, signal.SIGSTOP)
        until(lambda: not is_running(first) and not is_running(third), TIMEOUT + SLACK)
        assert is_running(second)
        assert lost_reason(run_path / "host-0").startswith("rank 1 was not heard for ")
        assert "rank 1 was not heard" in unheard(run_path, 0, 3)
        os.kill(second, signal.SIGCONT)
        until(lambda: not is_running(second), SLACK)


def test_a_killed_rank_is_given_up(run_path: Path) -> None:
    with ranks(run_path, 2) as (first, second):
        os.kill(second, signal.SIGKILL)
        until(lambda: not is_running(first), TIMEOUT + SLACK)
        assert "rank 1" in lost_reason(run_path / "host-0")


def test_a_rank_that_left_is_not_missed(run_path: Path) -> None:
    location, shape = Location.on_one_host(0, 2), ExpertShape(2, 8, 1)
    with ExitStack() as stack:
        recorders = []
        for rank in range(2):
            made = Recorder.create(run_path, rank, shape, 1, 4, "test", "data", 0, 1.0)
            stack.callback(made.close)
            recorders.append(made)
        watch = RankWatch(run_path, location, 0.1, recorders[0], end=lambda code: None)
        watch.look()
        recorders[1].close()
        for _ in range(4):
            time.sleep(1.0)
            watch.look()
        assert lost_reason(run_path) == ""


def test_its_own_pause_is_not_the_silence_of_others(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a suspend: the clock has jumped, and nobody could be heard meanwhile."""
    location, shape = Location.on_one_host(0, 2), ExpertShape(2, 8, 1)
    recorder = Recorder.create(run_path, 0, shape, 1, 4, "test", "data", 0, 10.0)
    ended: list[int] = []
    watch = RankWatch(run_path, location, 10.0, recorder, end=ended.append)
    now = time.monotonic()
    clock = iter([now + 1, now + 3601, now + 3602])
    with monkeypatch.context() as patch:
        patch.setattr("ultraep_serve.watch.time.monotonic", lambda: next(clock))
        for _ in range(3):
            watch.look()
    recorder.close()
    assert ended == []
    assert lost_reason(run_path) == ""


@pytest.mark.parametrize("wrong", ["no room", "nobody reads the log"])
def test_a_rank_ends_also_where_it_cannot_say_why(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def no_room(*_: object) -> None:
        raise OutputError("no space left")

    recorder = Recorder.create(run_path, 0, ExpertShape(2, 8, 1), 1, 4, "test", "data", 0, 10.0)
    (run_path / LOST_FILE).write_text("rank 1 was not heard")
    has_ended = threading.Event()
    watch = RankWatch(
        run_path, Location.on_one_host(0, 2), 10.0, recorder, end=lambda _: has_ended.set()
    )
    with monkeypatch.context() as patch:
        patch.setattr("ultraep_serve.watch._GRACE_SECONDS", 0.2)
        if wrong == "no room":
            patch.setattr("ultraep_serve.watch.write_whole", no_room)
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


def test_a_cut_link_is_shown_and_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        hosts.cut()
        until(lambda: all("not heard" in unheard(run_path, rank, 2) for rank in (0, 2)), 10.0)
        until(lambda: not any(map(is_running, children)), TIMEOUT + SLACK)
    for host, other in enumerate(reversed(hosts.addresses)):
        assert f"host {other} (ranks " in lost_reason(run_path / f"host-{host}")


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
    assert f"host {hosts.addresses[0]}" in lost_reason(run_path / "host-1")
    assert f"host {hosts.addresses[1]}" in lost_reason(run_path / "host-0")


def test_a_rank_stopped_elsewhere_ends_this_host(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        os.kill(children[3], signal.SIGSTOP)
        until(lambda: "rank 3 stands still" in unheard(run_path, 0, 2), 10.0)
        until(lambda: not any(map(is_running, children[:3])), TIMEOUT + SLACK)
    assert "rank 3 was not heard" in lost_reason(run_path / "host-0")
