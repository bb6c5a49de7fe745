"""Two hosts on one machine: network namespaces with a link between them that can be cut.

A process that shall be a host of its own is started by ``Hosts.command``, which also gives it its
own process ids, mounts, shared memory, IPC and name.
"""

import ctypes
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

_NETWORKS = Path("/run/netns")
_numbers = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """Names of the network namespaces of two hosts, and their addresses."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    link: str = "link0"  # the network's interface in each

    def cut(self) -> None:
        """Nothing passes any more, in either direction."""
        _run("ip", "-n", self.names[0], "link", "set", self.link, "down")

    def join(self) -> None:
        """Undo ``cut``."""
        _run("ip", "-n", self.names[0], "link", "set", self.link, "up")

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """``arguments`` run on ``host``, with /dev/shm and host name of its own."""
        script = (
            "mount -t tmpfs -o mode=1777,size=4g shm /dev/shm && "
            f"hostname {self.names[host]} && exec {shlex.join(arguments)}"
        )
        return [
            *("ip", "netns", "exec", self.names[host]),
            *("unshare", "-m", "-p", "-i", "-u", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", script),
        ]


@contextmanager
def two_namespaces() -> Iterator[Hosts]:
    """Two namespaces with a link between them; skips the test where they cannot be made."""
    if os.getuid() != 0:
        raise SkipTest("needs root, to make network namespaces")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            raise SkipTest(f"needs {program} (Debian packages iproute2 and util-linux)")
    number = next(_numbers)
    names = (f"uep{os.getpid()}-{number}a", f"uep{os.getpid()}-{number}b")
    hosts = Hosts(names, ("10.213.7.1", "10.213.7.2"))
    try:
        try:
            for name in names:
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            ends = ("netns", names[0], "type", "veth", "peer", "name", hosts.link, "netns")
            _run("ip", "link", "add", hosts.link, *ends, names[1])
            for name, address in zip(names, hosts.addresses, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", hosts.link)
                _run("ip", "-n", name, "link", "set", hosts.link, "up")
        except subprocess.CalledProcessError as error:
            raise SkipTest(f"network namespaces are not permitted: {error.stderr}") from error
        yield hosts
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "delete", name)


@contextmanager
def on_host(hosts: Hosts, host: int) -> Iterator[None]:
    """Inside, this thread and those that it starts use the network of ``host``."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_network(hosts.names[host])
        yield
    finally:
        _set_network(home)
        os.close(home)


def enter_network(name: str) -> None:
    """This thread, and those that it starts, are in the network namespace ``name``."""
    descriptor = os.open(_NETWORKS / name, os.O_RDONLY)
    try:
        _set_network(descriptor)
    finally:
        os.close(descriptor)


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
