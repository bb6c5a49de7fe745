"""Cores, access to the memory of other processes, and /dev/shm with what servers left there."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.shapes import model_shape
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, size, warning
from ultraep_serve.doctor.gpus import nvidia_smi
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.binding import (
    CPU_QUOTA,
    bind_ranks,
    binding_warnings,
    cores_here,
    cpu_quota,
    memory_nodes_here,
)
from ultraep_serve.system.machine import groups_sessions
from ultraep_serve.telemetry.record import record_dtype
from ultraep_serve.telemetry.run_directory import abandoned_run_directories
from ultraep_serve.telemetry.schema import HEADER_BYTES
from ultraep_serve.types import ExpertShape

__all__ = [
    "check_cores",
    "check_leftovers",
    "check_memory_access",
    "check_scheduling",
    "check_shared_memory",
    "ring_bytes",
]

_SECONDS = 30.0
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"


def check_cores(subject: Subject, quota_file: Path = CPU_QUOTA) -> Finding:
    """Cores that this process may use, by affinity and by the container's quota."""
    cores, ranks = cores_here(), subject.all_ranks_here
    seen = f"{len(cores)} cores for {ranks} ranks"
    problems = binding_warnings(
        bind_ranks(cores, ranks),
        cores,
        quota=cpu_quota(quota_file),
        memory_nodes=memory_nodes_here(),
    )
    if problems:
        remedy = f"ultraep-serve doctor --binding --ranks {ranks} shows which rank is bound where"
        return warning("cores", "; ".join([seen, *problems]), remedy)
    return ok("cores", seen)


def check_scheduling(grouped: bool | None = None, has_gpus: bool | None = None) -> Finding:
    """Whether the kernel lets ranks that compute on every core stall other sessions' processes.

    ``grouped``, ``has_gpus``: None looks them up.
    """
    grouped = groups_sessions() if grouped is None else grouped
    has_gpus = nvidia_smi(["--list-gpus"]) is not None if has_gpus is None else has_gpus
    name, setting = "scheduling", "kernel.sched_autogroup_enabled"
    if grouped and not has_gpus:
        return warning(
            name,
            f"{setting} is 1: where ranks keep all cores busy, a process of another session (the "
            "sidecar, a client) may wait for seconds, whatever its priority",
            f"on a machine that serves on its CPU: sysctl -w {setting}=0",
        )
    return ok(name, "cores are shared out by process" if not grouped else "GPUs leave cores free")


def check_memory_access(proc: Path = Path("/proc")) -> Finding:
    """Try whether a process can map another's memory through /proc/PID/fd, as ranks do."""
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
        return ok("memory access", f"processes of user {os.getuid()} open each other's memory")
    return error(
        "memory access",
        f"a process cannot open another's memory through {proc}/PID/fd: {problem}",
        "run all ranks as one user in one container (one process namespace), with /proc mounted, "
        "and without a security profile that forbids it",
    )


SHARED_MEMORY = Path("/dev/shm")
_ENGINE_BYTES = 704 << 20  # queues of the engine: vLLM reserves this much for two ranks
_TYPICAL_EXPERTS = 256
_ENGINE_FILES = ("vllm_dist_*", "sgl_shm_mq_*", "sglang_loads_*")
_BLOCK = 512  # bytes of one unit of st_blocks
_REMEDY = (
    "give the container more: docker run --shm-size=2g, in Compose shm_size: 2gb, in Kubernetes "
    "an emptyDir of medium Memory mounted at /dev/shm"
)


def check_shared_memory(subject: Subject, path: Path = SHARED_MEMORY) -> Finding:
    """Size and free space of /dev/shm against what rings and the engine need."""
    name = "shared memory"
    if not os.access(path, os.W_OK | os.X_OK):
        return error(name, f"{path} is missing or cannot be written", _REMEDY)
    status = os.statvfs(path)
    total, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    rings = ring_bytes(subject)
    seen = f"{path}: {size(free)} free of {size(total)}; records of {subject.all_ranks_here} ranks "
    seen += f"take {size(rings)}, queues of the engine up to {size(_ENGINE_BYTES)}"
    if free < rings:
        return error(name, seen, _REMEDY)
    if free < rings + _ENGINE_BYTES:
        return warning(name, seen, _REMEDY)
    return ok(name, seen)


def ring_bytes(subject: Subject) -> int:
    """Bytes of the rings of this host's ranks; for a typical model where none is given."""
    experts = _TYPICAL_EXPERTS
    if subject.model is not None:
        with contextlib.suppress(ConfigError):  # the check of the model reports it
            experts = model_shape(subject.model).num_experts
    shape = ExpertShape(subject.num_ranks, experts, subject.num_slots)
    records = BalanceConfig().ring_records * record_dtype(shape).itemsize
    return subject.all_ranks_here * (HEADER_BYTES + records)


def check_leftovers(path: Path = SHARED_MEMORY) -> list[Finding]:
    """Run directories of this user whose server was killed, and files that engines left."""
    try:
        return [_run_directories(), _engine_files(path)]
    except OSError as reason:
        return [warning("leftovers", f"cannot be searched for: {reason}", _REMEDY)]


def _run_directories() -> Finding:
    left = abandoned_run_directories()
    if not left:
        return ok("leftovers", "no run directory of a killed server")
    names = " ".join(map(str, left))
    held = sum(_bytes(path) for path in left)
    remedy = f"the next start removes them; to remove them now: rm -r {names}"
    return warning("leftovers", f"killed servers left {names} ({size(held)})", remedy)


def _engine_files(path: Path) -> Finding:
    candidates = [
        file
        for pattern in _ENGINE_FILES
        for file in path.glob(pattern)
        if file.is_file() and file.stat().st_uid == os.getuid()
    ]
    mapped = _mapped_files() if candidates else set()
    left = [file for file in candidates if str(file) not in mapped]
    if not left:
        return ok("leftovers", "no shared memory left by engines")
    held = sum(file.stat().st_blocks * _BLOCK for file in left)
    return warning(
        "leftovers",
        f"{path} holds {len(left)} files ({size(held)}) that engines left and no process maps",
        f"rm {' '.join(sorted(str(path / pattern) for pattern in _patterns(left)))} while no "
        "engine of yours runs; in a pod, recreate it",
    )


def _patterns(files: list[Path]) -> set[str]:
    return {p for p in _ENGINE_FILES for file in files if file.match(p)}


def _mapped_files() -> set[str]:
    """Names of files that any process maps, as far as this user may see."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = maps.read_text(errors="replace").splitlines()
            found.update(line[line.index("/") :] for line in lines if "/" in line)
    return found


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
