"""What a check has found, and what to do about it."""

from dataclasses import dataclass, field
from enum import Enum

from ultraep_serve.config import BalanceConfig
from ultraep_serve.launcher.engine import RankCount

_STEP = 1024
_TWO_RANKS = RankCount(total=2, here=2, stages=1, in_stage_here=2)


class Status(str, Enum):
    """How serious it is."""

    OK = "ok"
    WARNING = "warning"  # works, perhaps not as intended
    ERROR = "error"  # serving with balancing will fail


@dataclass(frozen=True)
class Subject:
    """What is to be served, as far as it is known."""

    config: BalanceConfig = field(default_factory=BalanceConfig)
    ranks: RankCount = _TWO_RANKS
    model: str | None = None  # a directory that holds the checkpoint to be balanced
    port: int | None = None  # of the engine's server
    refusal: str | None = None  # what the launcher says of the command; None: none was given

    @property
    def slots_here(self) -> int:
        """Replica slots of all ranks on this host."""
        return self.config.slots * self.ranks.micro_batches * self.ranks.here


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    seen: str
    remedy: str = ""  # empty where nothing needs to be done


def ok(name: str, seen: str) -> Finding:
    return Finding(name, Status.OK, seen)


def warning(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Status.WARNING, seen, remedy)


def error(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Status.ERROR, seen, remedy)


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < _STEP:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= _STEP
    return f"{num_bytes:.1f} TiB"
