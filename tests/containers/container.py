"""A container as a user has it, made of namespaces and control groups. Needs root, and no daemon.

What is started in it is user 1000 without capabilities, and the first process (number 1) of its
namespace. The root is read-only; /tmp, /dev and the home directory are memory. The mounts are the
container's own: nothing here touches those of the machine, and its /dev is never written to.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ways_to_start import ENVIRONMENT

__all__ = ["ROOT", "Container", "Limits", "container", "shared_memory"]

ROOT = Path(__file__).parents[2]
_GROUPS = Path("/sys/fs/cgroup")  # of version 1: a folder for each kind
_USER = "1000"
_HOME = "/home/user"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_STOP_SECONDS = 60.0
# Docker's: each kind of namespace but that of users.
_SPACES = ("--mount", "--pid", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child")


@dataclass(frozen=True)
class Limits:
    """What a container may have."""

    memory_mib: int = 6144
    cores: float = 1.5
    shared_memory_mib: int = 64  # of its own /dev/shm; Docker's default


@dataclass(frozen=True)
class Container:
    """A command in a container."""

    process: subprocess.Popen[bytes]  # outside: unshare, whose only child is the first inside
    log: Path
    limited: tuple[str, ...]  # kinds of control groups that are in force
    groups: list[Path] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The first process inside, by its number outside. Raises OSError where it has ended."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def in_its_network(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What Python does with ``arguments`` in the container's network."""
        command = ["nsenter", "-t", str(self.first), "-n", sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def stop(self) -> float | None:
        """Stop it as ``docker stop`` does; returns seconds, or None where it had to be killed."""
        began = time.monotonic()
        with suppress(OSError, IndexError):
            os.kill(self.first, signal.SIGTERM)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None
        return time.monotonic() - began

    def was_out_of_memory(self) -> bool:
        """Whether the kernel killed a process for the limit of memory."""
        for group in self.groups:
            with suppress(OSError):
                words = (group / "memory.oom_control").read_text().split()
                return int(words[words.index("oom_kill") + 1]) > 0
        return False

    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace")


@contextmanager
def container(
    name: str,
    arguments: Sequence[str],
    log: Path,
    limits: Limits,
    memory: Path | None = None,
    network_of: Container | None = None,
) -> Iterator[Container]:
    """``arguments`` of Python in a container, stopped at the end.

    ``memory`` is its /dev/shm where containers share it; so they may share a network.
    """
    command = [sys.executable, "-m", "tests.containers.confined", sys.executable, *arguments]
    drop = ["setpriv", "--reuid", _USER, "--regid", _USER, "--clear-groups", "--inh-caps=-all"]
    drop += ["--bounding-set=-all", *command]
    network = ["nsenter", "-t", str(network_of.first), "--net"] if network_of else []
    spaces = [*_SPACES, *([] if network_of else ["--net"])]
    with _groups(name, limits) as groups, log.open("wb") as file:
        script = _script(name, limits, memory, groups, shlex.join(drop))
        process = subprocess.Popen(
            [*network, "unshare", *spaces, "--mount-proc", "sh", "-ec", script],
            env=_environment(),
            cwd=ROOT,
            stdout=file,
            stderr=file,
            preexec_fn=lambda: _join(groups),  # what it starts is in them too
        )
        made = Container(process, log, tuple(group.parent.name for group in groups), groups)
        try:
            yield made
        finally:
            made.stop()


def _script(
    name: str, limits: Limits, memory: Path | None, groups: list[Path], command: str
) -> str:
    """What prepares the container from inside, and becomes ``command``."""
    own = f"mount -t tmpfs -o mode=1777,size={limits.shared_memory_mib}m shm /mnt/shm"
    lines = ["mount -t tmpfs -o mode=755,size=1m dev /mnt", "mkdir /mnt/shm"]
    for device in _DEVICES:
        lines += [f"touch /mnt/{device}", f"mount --bind /dev/{device} /mnt/{device}"]
    lines += [
        "ln -s /proc/self/fd /mnt/fd",
        f"mount --bind {memory} /mnt/shm" if memory else own,
        "mount --rbind /mnt /dev",
        *(f"mount --bind {group} {group.parent}" for group in groups),
        "mount -t tmpfs -o mode=1777,size=1g tmp /tmp",
        "mount -t tmpfs -o mode=755,size=1g home /home",
        f"mkdir {_HOME}",
        f"chown {_USER}:{_USER} {_HOME}",
        "mount -o remount,bind,ro /sys",
        "mount -o remount,bind,ro /",
        f"hostname {name}",
        "ip link set lo up",
        f"exec {command}",
    ]
    return "\n".join(lines)


def _environment() -> dict[str, str]:
    """An image's, and not this process's."""
    return {
        **ENVIRONMENT,
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": _HOME,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "benchmarks"))),
    }


@contextmanager
def _groups(name: str, limits: Limits) -> Iterator[list[Path]]:
    """Control groups with ``limits``; none where they cannot be made."""
    made: list[Path] = []
    values = {
        "memory": ("memory.limit_in_bytes", limits.memory_mib << 20),
        "cpu": ("cpu.cfs_quota_us", round(limits.cores * 100_000)),
    }
    with suppress(OSError):
        for kind, (file, value) in values.items():
            group = _GROUPS / kind / f"ultraep-check-{os.getpid()}-{name}"
            if group.parent.is_dir():
                group.mkdir()
                made.append(group)
                (group / file).write_text(str(value))
    try:
        yield made
    finally:
        for group in made:
            for _ in range(50):  # its processes have just ended
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.2)


def _join(groups: list[Path]) -> None:
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def shared_memory(path: Path, mib: int) -> Iterator[Path]:
    """Memory at ``path`` that containers share as their /dev/shm."""
    path.mkdir()
    options = f"mode=1777,size={mib}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "shm", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
