"""Which cores each rank of a CPU server computes on, where there are more ranks than NUMA nodes.

Engines bind each rank to a NUMA node of its own, and refuse to start where there are fewer.
"""

import os
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


def cores_of_ranks(num_ranks: int) -> list[list[int]]:
    """CPU numbers of each rank; none where each can have a NUMA node, and the engine binds it.

    Physical cores, in the order of their nodes, are shared out in equal runs, one hardware thread
    of each. Linux numbers second threads behind the first ones of all sockets, so CPU numbers alone
    say nothing. Where there are fewer cores than ranks, ranks share them.
    Only this process's CPUs count: its affinity follows control groups, Kubernetes' static CPU
    manager, and CPUs that are switched off.
    """
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (_SYSTEM / "node").glob("node[0-9]*")
        for cpu in _numbers(folder / "cpulist")
    }
    threads: dict[int, int] = {}  # by core: the first one that may be used
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _SYSTEM / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        threads.setdefault(min(_numbers(siblings), default=cpu), cpu)
    cores = sorted(threads.values(), key=lambda cpu: (node_of.get(cpu, 0), cpu))
    if num_ranks <= len({node_of.get(cpu, 0) for cpu in cores}):
        return []
    each = max(1, len(cores) // num_ranks)
    return [
        [cores[(rank * each + core) % len(cores)] for core in range(each)]
        for rank in range(num_ranks)
    ]


def _numbers(path: Path) -> set[int]:
    """The numbers of a list as Linux writes it, ``0-3,8``; empty where there is no such file."""
    found: set[int] = set()
    try:
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except OSError:
        return set()
    return found
