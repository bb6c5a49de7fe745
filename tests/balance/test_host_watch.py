"""RankWatch over hosts and pipeline stages: who is cut off, lost or leaves, and who ends for it."""

import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support.namespaces import Hosts, two_namespaces
from tests.support.ring_files import create
from tests.support.waiting import until
from tests.support.watching import (
    LIMIT,
    LONG,
    SLACK,
    TIMEOUT,
    halve_times,
    looks,
    pair,
    ranks,
    tell,
    unheard,
)
from ultraep_serve.balance.host_link import Message
from ultraep_serve.balance.watch import RankWatch
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_times(monkeypatch)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_namespaces() as made:
        yield made


@pytest.mark.parametrize("later", ["", "leaves"])
def test_a_host_that_is_lost_stays_lost(
    run_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Its launcher says so, and then stops its ranks, which say that they leave."""
    location, (first, second) = Location(0, 2, 1, 1), pair()
    ended: list[int] = []
    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=5.0)
    watch = RankWatch(run_path, location, 5.0, LONG, recorder, first, end=ended.append)
    monkeypatch.setattr("ultraep_serve.balance.watch._GRACE_SECONDS", 0.0)
    second.say_end("its engine ended")
    second.send(Message(1, [], [], "", later == "leaves"))
    watch.look()
    assert ended
    assert RunFiles(run_path).lost_reason().endswith("ended: its engine ended")
    for each in (recorder, first, second):
        each.close()


def test_a_rank_of_a_lost_host_does_not_say_that_it_leaves(run_path: Path) -> None:
    location, (first, second) = Location(0, 2, 1, 1), pair()
    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=5.0)
    watch = RankWatch(run_path, location, 5.0, LONG, recorder, first)
    RunFiles(run_path).give_up("its engine ended")
    watch.close()
    told = list(second.receive())
    assert told
    assert {(message.lost, message.leaves) for message in told} == {("its engine ended", False)}
    for each in (recorder, first, second):
        each.close()


@pytest.mark.parametrize(
    ("has_launcher", "is_stopped", "leaves"),
    [(True, False, []), (True, True, [True]), (False, False, [True])],
)
def test_a_rank_that_its_engine_stops_leaves_it_to_the_launcher_to_say_why(
    run_path: Path, has_launcher: bool, is_stopped: bool, leaves: list[bool]
) -> None:
    """An engine stops its ranks as well when one of them has failed."""
    location, (first, second) = Location(0, 2, 1, 1), pair()
    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=5.0)
    watch = RankWatch(run_path, location, 5.0, LONG, recorder, first)
    if has_launcher:
        RunFiles(run_path).mark_launched()
    if is_stopped:
        RunFiles(run_path).mark_stopped()
    watch.close()
    assert sorted({message.leaves for message in second.receive()}) == leaves
    for each in (recorder, first, second):
        each.close()


def test_batches_that_go_on_are_heard_where_datagrams_are_not(run_path: Path, hosts: Hosts) -> None:
    (run_path / "batches").touch()
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut()
        time.sleep(LIMIT + 2)
        assert all(map(BaseProcess.is_alive, children))
        assert [unheard(run_path, rank, 1) for rank in (0, 1)] == ["", ""]
        (run_path / "batches").unlink()
        time.sleep(LIMIT)
        assert [unheard(run_path, rank, 1) for rank in (0, 1)] == ["", ""]
        assert all(map(BaseProcess.is_alive, children))


def test_a_cut_link_is_shown_and_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        hosts.cut()
        until(lambda: all("not heard" in unheard(run_path, rank, 2) for rank in (0, 2)), 10.0)
        until(lambda: not any(map(BaseProcess.is_alive, children)), TIMEOUT + SLACK)
    for host, other in enumerate(reversed(hosts.addresses)):
        assert f"host {other} (ranks " in RunFiles(run_path / f"host-{host}").lost_reason()


def test_a_link_that_comes_back_ends_nothing(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut()
        until(lambda: "not heard" in unheard(run_path, 0, 1), 10.0)
        hosts.join()
        until(lambda: not any(unheard(run_path, rank, 1) for rank in (0, 1)), 5.0)
        time.sleep(TIMEOUT)
        assert all(map(BaseProcess.is_alive, children))


def test_a_link_cut_one_way_ends_both_hosts(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 2, hosts, host_size=1) as children:
        hosts.cut_one_way()
        until(lambda: "does not hear this host" in unheard(run_path, 0, 1), 10.0)
        until(lambda: not any(map(BaseProcess.is_alive, children)), TIMEOUT + SLACK)
    assert f"host {hosts.addresses[0]}" in RunFiles(run_path / "host-1").lost_reason()
    assert f"host {hosts.addresses[1]}" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_stopped_elsewhere_ends_this_host(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 4, hosts, host_size=2) as children:
        tell(children[3], signal.SIGSTOP)
        until(lambda: "rank 3 stands still" in unheard(run_path, 0, 2), 10.0)
        until(lambda: not any(map(BaseProcess.is_alive, children[:3])), TIMEOUT + SLACK)
    assert "rank 3 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def test_a_host_whose_batches_ended_with_its_datagrams_is_given_up(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, (first, second) = Location(0, 2, 1, 1), pair()
    ended: list[int] = []
    recorder = create(run_path, 0, ExpertShape(2, 8, 1), num_layers=1, timeout_seconds=5.0)
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
        assert all(map(BaseProcess.is_alive, children))
        assert "rank 2 not heard" in unheard(run_path, 3, 2)
        tell(children[2], signal.SIGSTOP)
        others = [children[rank] for rank in (0, 1, 3)]
        until(lambda: not any(map(BaseProcess.is_alive, others)), TIMEOUT + SLACK)
    assert "rank 2 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def test_a_rank_that_fails_is_lost_at_once(run_path: Path) -> None:
    with ranks(run_path, 4, host_size=2, timeout=LONG) as children:
        tell(children[3], signal.SIGUSR2)
        until(lambda: not any(map(BaseProcess.is_alive, children)), SLACK)
    error = "rank 3 failed: RuntimeError: out of memory"
    assert RunFiles(run_path / "host-1").lost_reason().startswith(error)
    assert (
        f"host 127.0.0.1 (ranks 2 to 3) ended: {error}"
        in RunFiles(run_path / "host-0").lost_reason()
    )


def test_a_host_whose_only_rank_fails_says_so_itself(run_path: Path) -> None:
    with ranks(run_path, 2, host_size=1, timeout=LONG) as children:
        tell(children[0], signal.SIGUSR2)
        until(lambda: not any(map(BaseProcess.is_alive, children)), SLACK)
    assert "ended: rank 0 failed: RuntimeError" in RunFiles(run_path / "host-1").lost_reason()


def test_failures_after_a_stop_are_its_consequence(run_path: Path) -> None:
    with ranks(run_path, 4, host_size=2, timeout=LONG) as children:
        tell(children[2], signal.SIGTERM)
        until(lambda: not children[2].is_alive(), SLACK)
        time.sleep(1.0)
        tell(children[3], signal.SIGUSR2)
        tell(children[1], signal.SIGUSR2)
        until(lambda: not children[3].is_alive() and not children[1].is_alive(), SLACK)
        time.sleep(LIMIT)
        assert children[0].is_alive()
        assert unheard(run_path, 0, 2).startswith("rank 1 not heard")


def test_stages_on_a_host_watch_each_other(run_path: Path) -> None:
    with ranks(run_path, 1, num_stages=2) as children:
        tell(children[1], signal.SIGSTOP)
        until(lambda: not children[0].is_alive(), TIMEOUT + SLACK)
    assert "rank 0 of pipeline stage 1 was not heard" in RunFiles(run_path / "host-0").lost_reason()


def test_stages_on_two_hosts_watch_each_other(run_path: Path, hosts: Hosts) -> None:
    with ranks(run_path, 1, hosts, num_stages=2) as children:
        links = [run_path / f"host-{host}" / "link" for host in (0, 1)]
        until(lambda: all(link.exists() for link in links), SLACK)
        time.sleep(2.0)  # both were heard
        hosts.cut()
        until(lambda: "not heard" in unheard(run_path, 0, 1), SLACK)
        until(lambda: not any(map(BaseProcess.is_alive, children)), TIMEOUT + SLACK)
    for host, other in enumerate(reversed(hosts.addresses)):
        name = f"host {other} (rank 0" + " of pipeline stage 1" * (host == 0)
        assert name in RunFiles(run_path / f"host-{host}").lost_reason()


def test_a_stage_that_was_never_heard_is_not_missed(run_path: Path, hosts: Hosts) -> None:
    hosts.cut()
    with ranks(run_path, 1, hosts, num_stages=2) as children:
        until((run_path / "host-0" / "link").exists, SLACK)
        time.sleep(LIMIT + 2.0)
        assert all(map(BaseProcess.is_alive, children))
