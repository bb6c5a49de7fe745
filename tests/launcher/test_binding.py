"""Which cores ranks get, on machines that hwloc's tools make up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.binding import (
    Core,
    RankCores,
    bind_ranks,
    binding_text,
    binding_warnings,
    cores_here,
    cores_of_hwloc,
)

LSTOPO = shutil.which("lstopo-no-graphics")
# As Linux numbers CPUs: the second threads of all cores come behind the first of all sockets.
TWO_SOCKETS = "pack:2 [numa] core:56 pu:2(indexes=core:pack)"
SNC = "pack:2 group:{} [numa] core:{} pu:2(indexes=core:group:pack)"
needs_hwloc = pytest.mark.skipif(LSTOPO is None, reason="needs Debian's hwloc-nox")

MACHINES = {  # name: (topology, CPUs that may be used, ranks, cores of a rank, nodes of the ranks)
    "one core": ("pack:1 [numa] core:1 pu:1", None, 2, 1, [[0], [0]]),
    "two cores": ("pack:1 [numa] core:2 pu:1", None, 2, 1, [[0], [0]]),
    "one socket": ("pack:1 [numa] core:8 pu:1", None, 2, 4, [[0], [0]]),
    "one socket, SMT": ("pack:1 [numa] core:8 pu:2(indexes=core)", None, 2, 4, [[0], [0]]),
    "two sockets": ("pack:2 [numa] core:56 pu:1", None, 2, 56, [[0], [1]]),
    "two sockets, SMT": (TWO_SOCKETS, None, 2, 56, [[0], [1]]),
    "more ranks than sockets": (TWO_SOCKETS, None, 4, 28, [[0], [0], [1], [1]]),
    "three ranks, two sockets": (TWO_SOCKETS, None, 3, 28, [[0], [0], [1]]),
    "SNC 2": (SNC.format(2, 28), None, 4, 28, [[0], [1], [2], [3]]),
    "SNC 2, a rank per socket": (SNC.format(2, 28), None, 2, 56, [[0, 1], [2, 3]]),
    "SNC 4": (SNC.format(4, 14), None, 8, 14, [[n] for n in range(8)]),
    "NPS 1": ("pack:1 [numa] core:64 pu:2(indexes=core)", None, 4, 16, [[0]] * 4),
    "NPS 2": (SNC.format(2, 32), None, 4, 32, [[0], [1], [2], [3]]),
    "NPS 4": (SNC.format(4, 16), None, 4, 32, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    "a cpuset in one socket": (TWO_SOCKETS, "0-15,112-127", 2, 8, [[0], [0]]),
    "a cpuset over both": (TWO_SOCKETS, "0-7,56-63,112-119,168-175", 2, 8, [[0], [1]]),
    "a lopsided cpuset": (TWO_SOCKETS, "0-7,56", 2, 4, [[0], [0]]),
    "only second threads": (TWO_SOCKETS, "112-127", 2, 8, [[0], [0]]),
    "asymmetric sockets": ("[numa] [numa] core:6 pu:1", None, 2, 3, [[0], [0]]),
}


def cpus(text: str) -> set[int]:
    parts = (part.split("-") for part in text.split(","))
    return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}


def topology(folder: Path, description: str, allowed: str | None) -> Path:
    """What hwloc writes for a made-up machine, of which a part may be used."""
    path = folder / "machine.xml"
    words = [str(LSTOPO), "--of", "xml", "-i", description]
    if allowed:
        mask = f"{sum(1 << cpu for cpu in cpus(allowed)):064x}"  # words of 32 bits for hwloc
        words += ["--restrict", ",".join(f"0x{mask[at : at + 8]}" for at in range(0, 64, 8))]
    subprocess.run([*words, str(path)], check=True, capture_output=True)
    return path


@needs_hwloc
@pytest.mark.parametrize("name", MACHINES)
def test_ranks_get_their_own_cores_within_nodes(name: str, tmp_path: Path) -> None:
    description, allowed, num_ranks, size, nodes = MACHINES[name]
    cores = cores_of_hwloc(topology(tmp_path, description, allowed))
    bindings = bind_ranks(cores, num_ranks)
    assert [list(binding.nodes) for binding in bindings] == nodes
    assert [len(binding.cpus) for binding in bindings] == [size] * num_ranks
    core_of = {cpu: number for number, core in enumerate(cores) for cpu in core.threads}
    used = [core_of[cpu] for binding in bindings for cpu in binding.cpus]  # and all may be used
    if len(cores) >= num_ranks:
        assert len(set(used)) == len(used), "no two threads are of one core"
        assert not [w for w in binding_warnings(bindings, cores) if "share a core" in w]
    else:
        (shared,) = binding_warnings(bindings, cores)
        assert "share a core" in shared


@needs_hwloc
def test_two_sockets_as_linux_numbers_them(tmp_path: Path) -> None:
    bindings = bind_ranks(cores_of_hwloc(topology(tmp_path, TWO_SOCKETS, None)), 2)
    assert binding_text(bindings) == [
        "rank 0: 56 cores 0-55, NUMA node 0",
        "rank 1: 56 cores 56-111, NUMA node 1",
    ]


@needs_hwloc
@needs_hwloc
def test_nodes_without_a_rank_are_told(tmp_path: Path) -> None:
    cores = cores_of_hwloc(topology(tmp_path, "pack:3 [numa] core:4 pu:1", None))
    (idle,) = binding_warnings(bind_ranks(cores, 2), cores)
    assert "NUMA node 2 has no rank (4 cores idle)" in idle


def test_what_makes_ranks_wait_is_told() -> None:
    cores = [Core(0, (0, 2)), Core(1, (1, 3))]
    siblings = [RankCores((0, 2), (0,)), RankCores((1,), (1,))]
    assert "both threads of a core" in binding_warnings(siblings, cores)[0]
    good = bind_ranks(cores, 2)
    assert not binding_warnings(good, cores, quota=2, memory_nodes=[0, 1])
    assert "quota is 1.5" in binding_warnings(good, cores, quota=1.5)[0]
    assert "node 1 may not be used" in binding_warnings(good, cores, memory_nodes=[0])[0]


@pytest.mark.parametrize("text", ["", "<topology/>", "nothing", "<a><object type='Machine'/></a>"])
def test_files_that_are_no_topology_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.xml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"topology|no core"):
        cores_of_hwloc(path)


def test_linux_says_the_same_as_hwloc(tmp_path: Path) -> None:
    cores = cores_here()
    assert {cpu for core in cores for cpu in core.threads} == os.sched_getaffinity(0)
    if LSTOPO is not None:
        path = tmp_path / "here.xml"
        words = [LSTOPO, "--of", "xml", "--restrict", "binding", str(path)]
        subprocess.run(words, check=True, capture_output=True)
        assert cores_of_hwloc(path) == cores


def test_sysfs_of_two_sockets_with_smt(tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(
            f"{node * 2}-{node * 2 + 1},{node * 2 + 4}-{node * 2 + 5}\n"
        )
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    cores = cores_here(range(8), tmp_path)
    assert cores == [Core(c // 2, (c, c + 4)) for c in range(4)]
    assert [b.cpus for b in bind_ranks(cores, 2)] == [(0, 1), (2, 3)]
    assert cores_here({0, 1}, tmp_path / "none") == [Core(0, (0,)), Core(0, (1,))]
