"""What a check has found, and what to do about it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ultraep_serve.system.versions import NewerEngine

__all__ = ["Finding", "Status", "Subject", "error", "ok", "size", "warning"]

_STEP = 1024


class Status(str, Enum):
    """How serious it is."""

    OK = "ok"
    WARNING = "warning"  # works, perhaps not as intended
    ERROR = "error"  # serving with balancing will fail


@dataclass(frozen=True)
class Subject:
    """What is to be served, as far as it is known."""

    port: int | None = None  # of the engine's server; the engines' own defaults otherwise
    sidecar_port: int | None = None  # beside the server's otherwise
    host: str = "0.0.0.0"  # address that the server listens on
    sidecar_host: str = "0.0.0.0"
    serves: bool = True  # whether this host has a server; else it has ranks and a sidecar alone
    has_sidecar: bool = True  # that starts with the server
    model: str | None = None  # to be balanced: a directory, its config.json, or a built-in shape
    num_ranks: int = 2  # R: of one pipeline stage, on all hosts
    host_ranks: int | None = None  # of them on this host; all otherwise
    num_stages: int = 1
    all_host_ranks: int | None = None  # of all stages on this host; one stage's otherwise
    domain_size: int = 0  # ranks that weights move between; 0: those of one host
    num_slots: int = 2  # replica slots per rank
    weight_type: str = "bf16"
    on_newer_engine: NewerEngine = "refuse"  # as the setting of this name
    command: str | None = None  # that is to serve: what the launcher has against it, or nothing

    @property
    def ranks_here(self) -> int:
        """Ranks of one pipeline stage on this host."""
        return self.host_ranks or self.num_ranks

    @property
    def all_ranks_here(self) -> int:
        """Ranks of all pipeline stages on this host."""
        return self.all_host_ranks or self.ranks_here


@dataclass(frozen=True)
class Finding:
    """One result of one check."""

    name: str
    status: Status
    seen: str
    remedy: str = ""  # empty where nothing needs to be done
    figures: dict[str, Any] = field(default_factory=dict)  # the same for programs


def ok(name: str, seen: str, **figures: Any) -> Finding:
    """Nothing to do."""
    return Finding(name, Status.OK, seen, figures=figures)


def warning(name: str, seen: str, remedy: str, **figures: Any) -> Finding:
    """Something to know."""
    return Finding(name, Status.WARNING, seen, remedy, figures)


def error(name: str, seen: str, remedy: str, **figures: Any) -> Finding:
    """Something to fix before serving."""
    return Finding(name, Status.ERROR, seen, remedy, figures)


def size(num_bytes: float) -> str:
    """``num_bytes`` for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < _STEP:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= _STEP
    return f"{num_bytes:.1f} TiB"
