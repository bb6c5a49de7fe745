"""Domains and hosts: ranks that reach each other's memory, and where a rank is among all of them.

Weights move only inside a domain, tokens go anywhere. A domain is all ranks of one host, or, where
``domain_size`` says so, a part of them or all ranks of several hosts. Ranks share a host when they
share memory and process ids: ``/dev/shm``, or a run directory that is given, and a process
namespace.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from ultraep_serve.errors import UnsupportedError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SELF = Path("/proc/self")


class PipelineStage(NamedTuple):
    """Which of a model's stages a rank runs. Each has its own layers, balanced by its own ranks."""

    number: int = 0
    num_stages: int = 1
    run: int = 0  # 62 bits, the same in all stages of an engine and in no other engine


ONLY_STAGE = PipelineStage()


@dataclass(frozen=True)
class Location:
    """Where a rank stands. Hosts hold contiguous ranks, equally many each; so do domains."""

    rank: int
    num_ranks: int  # R, of the whole group
    host_size: int  # ranks of each host, divides R
    domain_size: int  # D, ranks of each domain; divides host_size, or is some hosts' together
    first_host: str = ""  # name of the host that holds rank 0

    @classmethod
    def on_one_host(cls, rank: int, num_ranks: int) -> "Location":
        """Place all ranks on one host, in one domain."""
        return cls(rank, num_ranks, num_ranks, num_ranks)

    @property
    def host(self) -> range:
        return self._among(self.host_size)

    @property
    def domain(self) -> range:
        return self._among(self.domain_size)

    def _among(self, size: int) -> range:
        """So many ranks, from a multiple of that on, this one among them."""
        first = self.rank // size * size
        return range(first, min(first + size, self.num_ranks))

    @property
    def spans_hosts(self) -> bool:
        """Whether domains reach beyond a host, through memory that only GPUs can share so."""
        return self.domain_size > self.host_size

    @property
    def num_domains(self) -> int:
        return self.num_ranks // self.domain_size

    @property
    def is_host_primary(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.rank == self.host.start


def host_identity(shared: Path) -> int:
    """63 bits that are the same for all who share the directory ``shared`` and process ids."""
    status = shared.stat()
    machine = _BOOT.read_text() if _BOOT.exists() else os.uname().nodename
    place = f"{status.st_dev}|{status.st_ino}|{shared.resolve()}|{process_namespace()}"
    names = f"{machine}|{place}"
    return int.from_bytes(blake2b(names.encode(), digest_size=8).digest(), "little") >> 1


def locate(rank: int, hosts: Sequence[int], domain_size: int, first_host: str = "") -> Location:
    """Where ``rank`` stands, given the identity of every rank's host by rank.

    ``domain_size`` 0 makes a host one domain. Raises UnsupportedError, on every rank alike, where
    hosts are no equal runs of ranks, or domains no equal parts of hosts or groups of them.
    """
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(runs) != len(set(hosts)):
        raise UnsupportedError(
            "the ranks of a host do not follow each other, which domains must; start the hosts "
            "with ascending node or start ranks"
        )
    if len(set(runs)) != 1:
        raise UnsupportedError(
            f"hosts hold {runs} ranks, one after another; start equally many on each"
        )
    size = domain_size or runs[0]
    if not domains_fit(size, runs[0], len(hosts)):
        raise UnsupportedError(
            f"--domain-size {size} does not divide the {runs[0]} ranks of a host, nor make equal "
            f"groups of the {len(runs)} hosts; choose a divisor of {runs[0]}, or 0 for all of "
            "them"
        )
    return Location(rank, len(hosts), runs[0], size, first_host)


def domains_fit(domain_size: int, host_size: int, num_ranks: int) -> bool:
    """Whether domains are equal parts of hosts, or of equally many whole hosts each."""
    whole_hosts = domain_size % host_size == 0 and num_ranks % domain_size == 0
    return host_size % domain_size == 0 or whole_hosts


def is_process_alive(process: int) -> bool:
    """Whether ``process``, in this process namespace, exists and is not a zombie."""
    return process_state(process) not in "ZX"


def process_state(process: int) -> str:
    """The letter of its state in /proc; X where it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def process_namespace() -> int:
    """Number of this process's process namespace; process ids mean the same within one.

    0 where it is not known, because /proc is not mounted, or shows the processes of another one.
    """
    try:
        return (_SELF / "ns/pid").stat().st_ino if _SELF.readlink().name == str(os.getpid()) else 0
    except OSError:
        return 0
