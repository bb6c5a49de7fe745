"""Whether another process of this machine is still there."""

import os
from pathlib import Path

__all__ = ["is_process_alive", "process_namespace"]


def is_process_alive(process: int) -> bool:
    """Whether ``process``, in this process namespace, exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def process_namespace() -> int:
    """Number of this process's process namespace; process ids mean the same within one."""
    return os.stat("/proc/self/ns/pid").st_ino
