"""Cores of ranks, on machines made of files as Linux has them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ultraep_serve.launcher.cores import cores_of_ranks


def machine(path: Path, *nodes: list[tuple[int, ...]]) -> Path:
    """A folder like /sys/devices/system: ``nodes`` of cores, each with its threads' CPU numbers."""
    for number, cores in enumerate(nodes):
        node = path / "node" / f"node{number}"
        node.mkdir(parents=True)
        cpus = [cpu for threads in cores for cpu in threads]
        (node / "cpulist").write_text(",".join(map(str, sorted(cpus))) + "\n")
        for threads in cores:
            for cpu in threads:
                topology = path / "cpu" / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, threads)) + "\n")
    return path


def sockets(path: Path) -> Path:
    """Two sockets of four cores; Linux numbers second threads behind all first ones."""
    return machine(
        path, [(cpu, cpu + 8) for cpu in range(4)], [(cpu, cpu + 8) for cpu in range(4, 8)]
    )


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Of so many ranks, where a process may use the ``allowed`` CPUs of the machine there."""

    def found(num_ranks: int, allowed: Iterable[int]) -> list[list[int]]:
        monkeypatch.setattr("ultraep_serve.launcher.cores._SYSTEM", tmp_path)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(allowed))
        return cores_of_ranks(num_ranks)

    return found


Cores = Callable[..., list[list[int]]]


def test_the_engine_binds_ranks_that_have_a_node_each(tmp_path: Path, cores: Cores) -> None:
    sockets(tmp_path)
    assert cores(2, range(16)) == []


def test_ranks_share_physical_cores_by_node(tmp_path: Path, cores: Cores) -> None:
    sockets(tmp_path)
    assert cores(4, range(16)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cores(3, range(16)) == [[0, 1], [2, 3], [4, 5]]
    # what the process may not use is nobody's; of a core with one such thread, the other one is
    assert cores(3, [*range(8, 12), 5, 6, 13]) == [[8, 9], [10, 11], [5, 6]]


def test_more_ranks_than_cores_share_them(tmp_path: Path, cores: Cores) -> None:
    machine(tmp_path, [(0, 2), (1, 3)])
    assert cores(3, range(4)) == [[0], [1], [0]]


def test_a_machine_that_says_nothing_has_one_thread_per_core_and_one_node(cores: Cores) -> None:
    assert cores(2, [0, 1, 2, 3]) == [[0, 1], [2, 3]]
    assert cores(1, [0, 1]) == []
