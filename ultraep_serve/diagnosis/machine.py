"""Cores against ranks, and whether ranks may open each other's memory."""

import os
import subprocess
import sys
from pathlib import Path

from ultraep_serve.diagnosis.finding import Finding, Subject, error, ok, warning

__all__ = ["check_cores", "check_memory_access"]

_SECONDS = 30.0
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def check_cores(subject: Subject, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores, quota = len(os.sched_getaffinity(0)), _quota(cgroup / "cpu.max")
    seen = f"{cores} cores for {subject.ranks_here} ranks"
    if quota is not None and quota < cores:
        return [
            warning(
                "cores",
                f"{seen}, but the container's quota is {quota:g}: pinned ranks are throttled",
                "give the container whole cores (Docker: --cpuset-cpus; Kubernetes: integer "
                "requests equal to limits and the static CPU manager)",
            )
        ]
    if cores < subject.ranks_here:
        remedy = "use fewer ranks or more cores; ranks that share a core wait for each other"
        return [warning("cores", seen, remedy)]
    return [ok("cores", seen)]


def check_memory_access(proc: Path = Path("/proc")) -> list[Finding]:
    """Whether a process can map a sibling's memfd through /proc/PID/fd, as ranks do: by trying."""
    descriptor = os.memfd_create("ultraep-doctor", os.MFD_CLOEXEC)
    target = proc / str(os.getpid()) / "fd" / str(descriptor)
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", _OPEN, str(target)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        problem = "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as reason:
        problem = str(reason)
    finally:
        os.close(descriptor)
    if not problem:
        return [ok("memory access", f"processes of user {os.getuid()} open each other's memory")]
    return [
        error(
            "memory access",
            f"a process cannot open another's memory through {proc}/PID/fd: {problem}",
            "run all ranks as one user in one container (one process namespace), with /proc "
            "mounted, and without a security profile that forbids it",
        )
    ]


def _quota(path: Path) -> float | None:
    """Cores per second that the control group may use; None: as many as there are."""
    try:
        limit, period = path.read_text().split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
