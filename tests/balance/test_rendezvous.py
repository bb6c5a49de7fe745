"""How ranks hand each other memory, between real processes; memfds stand in for GPU memory."""

import os
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.balance import rendezvous
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.rendezvous import GatherRendezvous, SocketRendezvous, map_domain
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.errors import FabricError
from ultraep_serve.system.topology import Location


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def swap_memory(rank: int, num_ranks: int, run_path: Path, count: int) -> list[tuple[str, str]]:
    """(layout, what its last descriptor holds) of every other rank."""
    mine = []
    for index in range(count):
        mine.append(os.memfd_create("shared", os.MFD_CLOEXEC))
        os.write(mine[-1], f"rank {rank} memory {index}".encode())
    before = open_descriptors()
    time.sleep(0.05 * ((rank * 3) % num_ranks))  # they do not come in order
    meeting = SocketRendezvous(run_path, rank, range(num_ranks), 30.0)
    handshakes = dict(meeting.swap(f"layout {rank}".encode(), mine))
    assert open_descriptors() == before + (num_ranks - 1) * count  # no socket is left
    seen = []
    for _, handshake in sorted(handshakes.items()):
        assert len(handshake.shareables) == count
        for index, descriptor in enumerate(handshake.shareables):
            assert isinstance(descriptor, int)
            assert not os.get_inheritable(descriptor)
            assert os.pread(descriptor, 100, 0).decode().endswith(f" memory {index}")
        seen.append((handshake.layout.decode(), os.pread(descriptor, 100, 0).decode()))
    return seen


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 1), (2, 3), (4, 3), (8, 1), (2, 450)])
def test_descriptors_reach_every_other_process(run_path: Path, num_ranks: int, count: int) -> None:
    seen = run_ranks(swap_memory, num_ranks, num_ranks, run_path, count)
    for rank, others in enumerate(seen):
        expected = [other for other in range(num_ranks) if other != rank]
        assert others == [(f"layout {r}", f"rank {r} memory {count - 1}") for r in expected]
    assert list(run_path.iterdir()) == []


def test_handles_of_hosts_are_those_of_the_domains_ranks() -> None:
    """Of the second domain too, whose ranks do not begin at 0."""
    handles = [bytes([rank]) * 64 for rank in range(4, 7)]
    gathered = iter(([b"4", b"5", b"6"], handles))
    meeting = GatherRendezvous(5, range(4, 7), lambda _: next(gathered))
    found = {
        rank: (each.layout, each.shareables) for rank, each in meeting.swap(b"5", handles[1:2])
    }
    assert found == {4: (b"4", handles[:1]), 6: (b"6", handles[2:])}


def test_a_socket_of_an_earlier_run_is_replaced(run_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(run_path / "fabric-0.socket"))
    run_ranks(swap_memory, 2, 2, run_path, 1)
    assert list(run_path.iterdir()) == []


def map_many_layers(rank: int, run_path: Path) -> tuple[int, int]:
    """Descriptors before and after, where fewer may be open than all ranks' memory takes."""
    pool = SlotPool(HostMemory(), 1, 4096, per_layer=True)
    for _ in range(60):
        pool.adopt([torch.zeros(1, 8192)])
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 200, before + 200))
    meeting = SocketRendezvous(run_path, rank, range(4), 30.0)
    with ExitStack() as undo:
        map_domain(pool, meeting, Location.on_one_host(rank, 4), 4096, [], undo)
        return before, open_descriptors()


def test_memory_of_one_rank_after_the_other_is_mapped(run_path: Path) -> None:
    for before, after in run_ranks(map_many_layers, 4, run_path):
        assert after <= before + 2


def come_or_stay_away(rank: int, run_path: Path, absent: int) -> None:
    if rank != absent:
        list(SocketRendezvous(run_path, rank, range(3), 0.5).swap(b"", []))


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_does_not_come_is_an_error(run_path: Path, absent: int) -> None:
    outcomes = outcomes_of_ranks(come_or_stay_away, 3, run_path, absent)
    outcomes.pop(absent)
    assert [outcome.error for outcome in outcomes] == ["PeerTimeoutError"] * 2
    for outcome in outcomes:
        assert str(absent) in outcome.message.split("waited for rank ")[1].split(", which")[0]
    assert list(run_path.iterdir()) == []


def test_a_rank_that_ends_half_way_leaves_no_descriptors(run_path: Path) -> None:
    before = open_descriptors()
    path = str(run_path / "fabric-0.socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        pid = os.fork()
        if pid == 0:  # says that two descriptors come, sends one and ends
            connection = listener.accept()[0]
            connection.sendall(b"\0\0\0\0" + b"\0" * 8 + b"\0\0\0\2")
            socket.send_fds(connection, [b"."], [0])
            os._exit(0)
        listener.close()
        with pytest.raises(FabricError, match="sent 1 of 2 descriptors"):
            list(SocketRendezvous(run_path, 1, range(2), 5.0).swap(b"", []))
        os.waitpid(pid, 0)
    assert open_descriptors() == before


def test_where_proc_is_not_mounted_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_OPEN_FILES", tmp_path / "none")
    with pytest.raises(FabricError, match="/proc is not mounted here"):
        list(SocketRendezvous(tmp_path, 0, range(2), 5.0).swap(b"", []))
