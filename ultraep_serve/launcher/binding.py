"""Which cores each rank of a CPU server computes on.

A rank gets cores of one NUMA node, or whole nodes where there are more of them than ranks, and one
hardware thread of each core: its memory is then near, and no two threads share what multiplies.
All ranks get equally many cores, because each waits for the slowest. Linux numbers the second
threads of all cores behind the first ones of all sockets, so CPU numbers alone say nothing.

The machine is read from sysfs, or from what hwloc's ``lstopo --of xml`` has written.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_text

__all__ = [
    "CPU_QUOTA",
    "Core",
    "CoreBinding",
    "RankCores",
    "bind_ranks",
    "binding_text",
    "binding_warnings",
    "cores_here",
    "cores_of_hwloc",
    "cpu_quota",
    "memory_nodes_here",
]

_SYSTEM = Path("/sys/devices/system")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of the control group


@dataclass(frozen=True)
class Core:
    """A physical core, as far as this process may use it."""

    node: int  # NUMA node, whose memory is nearest
    threads: tuple[int, ...]  # CPU numbers, ascending


@dataclass(frozen=True)
class RankCores:
    """What one rank computes on."""

    cpus: tuple[int, ...]  # CPU numbers, one for each core
    nodes: tuple[int, ...]  # NUMA nodes that these belong to, ascending


@dataclass(frozen=True)
class CoreBinding:
    """The cores of all ranks of this host, and the engine's setting that says so."""

    variable: str  # of the engine's environment
    cores: tuple[Core, ...]
    ranks: tuple[RankCores, ...]

    @classmethod
    def here(cls, variable: str, num_ranks: int) -> "CoreBinding":
        """Bind ``num_ranks`` ranks to the cores of this machine that this process may use."""
        cores = cores_here()
        return cls(variable, tuple(cores), tuple(bind_ranks(cores, num_ranks)))

    @property
    def has_node_per_rank(self) -> bool:
        """Whether there are as many NUMA nodes as ranks, and more than one."""
        return 1 < len(self.ranks) == len({core.node for core in self.cores})

    @property
    def setting(self) -> str:
        """The value of ``variable``, as both engines write it: ``0,1|2,3``."""
        return "|".join(",".join(map(str, rank.cpus)) for rank in self.ranks)

    def lines(self, chosen: str | None) -> list[str]:
        """For the operator: who computes where, and what is wrong with it.

        ``chosen`` is the value of ``variable`` that the engine is started with, None: none.
        """
        if chosen is None:
            return ["the engine binds each rank to a NUMA node by itself"]
        if chosen != self.setting:
            return [f"ranks are bound by {self.variable} = {chosen!r}"]
        found = binding_warnings(
            self.ranks, self.cores, quota=cpu_quota(), memory_nodes=memory_nodes_here()
        )
        return [*binding_text(self.ranks), *found]


def cores_here(allowed: Collection[int] | None = None, system: Path = _SYSTEM) -> list[Core]:
    """The cores that this process may use, by node and then by CPU number.

    ``allowed`` CPU numbers are those of the process where None: its affinity follows control
    groups, Kubernetes' static CPU manager, and CPUs that are switched off. A machine that says
    nothing of cores or nodes has one thread per core and one node.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    node_of: dict[int, int] = {}
    for folder in (system / "node").glob("node[0-9]*"):
        for cpu in _listed(folder / "cpulist"):
            node_of[cpu] = int(folder.name.removeprefix("node"))
    siblings = {}
    for cpu in usable:
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        siblings[cpu] = frozenset(_listed(topology / "thread_siblings_list")) or frozenset({cpu})
    by_core = defaultdict(list)
    for cpu in sorted(usable):
        by_core[siblings[cpu]].append(cpu)
    return _in_order(
        Core(node_of.get(threads[0], 0), tuple(threads)) for threads in by_core.values()
    )


def cores_of_hwloc(path: Path) -> list[Core]:
    """The cores in a topology that hwloc's ``lstopo --of xml`` has written; as ``cores_here``.

    Raises ConfigError.
    """
    try:
        root = ElementTree.fromstring(read_text(path, "the topology"))
        machine = next(root.iter("object"))
        allowed = _bits(machine.get("allowed_cpuset") or machine.get("cpuset") or "")
        found = defaultdict(list)
        for thing in root.iter("object"):
            found[thing.get("type")].append(
                (int(thing.get("os_index", 0)), _bits(thing.get("cpuset") or ""))
            )
    except (ElementTree.ParseError, StopIteration, ValueError) as error:
        raise ConfigError(
            f"{path} is no topology of hwloc's ({error}); write one with `lstopo --of xml {path}`"
        ) from error
    nodes = sorted(found["NUMANode"])
    cores = []
    for _, cpus in found["Core"] or found["PU"]:
        if threads := sorted(cpus & allowed):
            near = (number for number, node_cpus in nodes if threads[0] in node_cpus)
            cores.append(Core(next(near, 0), tuple(threads)))
    if not cores:
        raise ConfigError(f"{path} holds no core that may be used")
    return _in_order(cores)


def memory_nodes_here(status: Path = Path("/proc/self/status")) -> set[int] | None:
    """NUMA nodes that this process may take memory of; None where Linux does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("Mems_allowed_list:")]
    return _numbers(found[0]) if found else None


def cpu_quota(path: Path = CPU_QUOTA) -> float | None:
    """Cores per second that the control group may use; None: as many as there are."""
    try:
        limit, period = path.read_text().split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def bind_ranks(cores: Sequence[Core], num_ranks: int) -> list[RankCores]:
    """The cores of each rank; equally many, as many as can be had within nodes or in whole ones.

    Ranks that follow each other lie near each other. Where there are fewer cores than ranks, ranks
    share them.
    """
    if len(cores) < num_ranks:
        shared = [cores[rank % len(cores)] for rank in range(num_ranks)]
        return [_rank_cores([core]) for core in shared]
    by_node: dict[int, list[Core]] = defaultdict(list)
    for core in cores:
        by_node[core.node].append(core)
    nodes = list(by_node.values())
    inside = _most_within(nodes, num_ranks)
    whole = _whole_nodes(nodes, num_ranks)
    size = min(map(len, whole), default=0)
    if size > inside:
        return [_rank_cores(group[:size]) for group in whole]
    return [_rank_cores(part) for part in _parts_of_nodes(nodes, num_ranks, inside)]


def binding_text(bindings: Sequence[RankCores]) -> list[str]:
    """One line for each rank: its cores, and the node or nodes that these belong to."""
    return [
        f"rank {rank}: {len(binding.cpus)} cores {_ranges(binding.cpus)}, "
        f"NUMA node{'s' if len(binding.nodes) > 1 else ''} {_ranges(binding.nodes)}"
        for rank, binding in enumerate(bindings)
    ]


def binding_warnings(
    bindings: Sequence[RankCores],
    cores: Sequence[Core],
    *,
    quota: float | None = None,
    memory_nodes: Collection[int] | None = None,
) -> list[str]:
    """What makes ranks wait: shared cores or siblings, far memory, a quota, cores left idle.

    ``quota`` in cores, where a control group limits time; ``memory_nodes`` that this process may
    take memory of, None: all of them.
    """
    core_of = {cpu: number for number, core in enumerate(cores) for cpu in core.threads}
    ranks_on: dict[int, set[int]] = defaultdict(set)
    used = [cpu for binding in bindings for cpu in binding.cpus]
    for rank, binding in enumerate(bindings):
        for cpu in binding.cpus:
            ranks_on[core_of.get(cpu, -1 - cpu)].add(rank)
    found = []
    if any(len(ranks) > 1 for ranks in ranks_on.values()):
        found.append("several ranks share a core, and wait for each other; start fewer ranks")
    if len({core_of.get(cpu, -1 - cpu) for cpu in used}) < len(set(used)):
        found.append("ranks compute on both threads of a core; give one thread for each core")
    near = {node for binding in bindings for node in binding.nodes}
    if memory_nodes is not None and (far := near - {*memory_nodes}):
        found.append(
            f"memory of NUMA node {_ranges(sorted(far))} may not be used, so that ranks there "
            "read another node's; allow it (cpuset.mems)"
        )
    if quota is not None and quota < len(set(used)):
        found.append(
            f"ranks compute on {len(set(used))} cores and the control group's quota is {quota:g}; "
            "give whole cores (Docker: --cpuset-cpus; Kubernetes: integer requests equal to "
            "limits and the static CPU manager)"
        )
    idle = Counter(core.node for core in cores if not {*core.threads} & {*used})
    if empty := [node for node in idle if node not in near]:
        found.append(
            f"NUMA node {_ranges(sorted(empty))} has no rank ({sum(idle[n] for n in empty)} cores "
            "idle); as many ranks as nodes, or a divisor of that, use all of them"
        )
    return found


def _most_within(nodes: Sequence[Sequence[Core]], num_ranks: int) -> int:
    """Cores that every rank can have without crossing a node; 0 is never returned."""
    sizes = [len(node) for node in nodes]
    fitting = (n for n in range(max(sizes), 0, -1) if sum(s // n for s in sizes) >= num_ranks)
    return next(fitting)


def _whole_nodes(nodes: Sequence[Sequence[Core]], num_ranks: int) -> list[list[Core]]:
    """As many whole nodes for each rank as all can have, neighbours together; perhaps none."""
    each = len(nodes) // num_ranks
    return [
        list(chain.from_iterable(nodes[rank * each : (rank + 1) * each]))
        for rank in range(num_ranks)
        if each
    ]


def _parts_of_nodes(
    nodes: Sequence[Sequence[Core]], num_ranks: int, size: int
) -> list[Sequence[Core]]:
    """``size`` cores of one node for each rank; nodes with more room left come first."""
    ranks = [0] * len(nodes)
    for _ in range(num_ranks):
        room = [len(node) // size - count for node, count in zip(nodes, ranks, strict=True)]
        ranks[room.index(max(room))] += 1
    return [
        node[part * size :][:size]
        for node, count in zip(nodes, ranks, strict=True)
        for part in range(count)
    ]


def _rank_cores(cores: Sequence[Core]) -> RankCores:
    cpus = tuple(core.threads[0] for core in cores)
    return RankCores(cpus, tuple(sorted({core.node for core in cores})))


def _in_order(cores: Iterable[Core]) -> list[Core]:
    return sorted(cores, key=lambda core: (core.node, core.threads))


def _listed(path: Path) -> set[int]:
    """Numbers of a list in a file of Linux's; empty where there is no such file."""
    try:
        return _numbers(path.read_text().strip())
    except OSError:
        return set()


def _numbers(text: str) -> set[int]:
    """The numbers of a list as Linux writes it, ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _bits(mask: str) -> set[int]:
    """CPU numbers of a mask as hwloc writes it: words of 32 bits, the highest first."""
    value = 0
    for word in mask.split(","):
        value = value << 32 | int(word or "0", 16)
    return {bit for bit in range(value.bit_length()) if value >> bit & 1}


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending ``numbers`` as a list like ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
