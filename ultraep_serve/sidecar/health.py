"""The state of every rank, and why it is not ready."""

from dataclasses import dataclass, field
from typing import NamedTuple

from ultraep_serve.sidecar.statistics.batches import BatchSnapshot
from ultraep_serve.sidecar.statistics.snapshot import (
    SCHEMA_VERSION,
    BatchesCount,
    Documented,
    ImbalanceSnapshot,
    PhaseSnapshot,
    RankView,
    Savings,
)
from ultraep_serve.telemetry.schema import RingState

__all__ = ["Overview", "RankHealth", "RankList", "ReadinessRead", "problem", "rank_health"]


@dataclass(frozen=True)
class RankHealth(Documented):
    """The current state of one rank."""

    rank: int
    pid: int | None
    state: str
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool
    """It sends heartbeats and has not failed, stopped or died."""
    problem: str
    """Why it is not ready; empty when it is."""
    heartbeat_age_seconds: float | None
    last_batch_age_seconds: float | None
    """Since its last batch of any size; null before any."""
    slot_bytes: int
    """Memory reserved for its replica slots."""
    lost: int
    """Records that it could not write, since it started."""
    missed: int
    """Records overwritten or damaged before the sidecar read them."""


@dataclass(frozen=True)
class RankList(Documented):
    """All ranks of this host."""

    ready: bool
    """Every rank of this host is alive and ready."""
    num_ranks: int
    """Of the whole group, over all hosts."""
    ranks: list[RankHealth]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Overview(Documented):
    """Health and balance over the last seconds, and the newest batch."""

    time_ns: int
    """Unix time of this answer."""
    ready: bool
    reasons: dict[str, str]
    """Why the run is not ready, by rank."""
    window_seconds: float
    unbalanced: str = ""
    """Why the server runs without balancing, as its operator allowed; else empty."""
    engine: str | None = None
    """Null while no ring can be read, like the fields below; lists are then empty."""
    mode: str | None = None
    policy: str | None = None
    """Now in force."""
    paused_policy: str | None = None
    """The policy that resume puts in force again; null while not paused."""
    num_ranks: int | None = None
    """Of the whole group, over all hosts; ranks are those of this host."""
    num_layers: int | None = None
    num_experts: int | None = None
    num_slots: int | None = None
    """Replica slots per rank."""
    batches: BatchesCount | None = None
    phases: dict[str, PhaseSnapshot] = field(default_factory=dict)
    """Percentiles come from a histogram: the excess over 1 is accurate to a tenth."""
    time_imbalance: ImbalanceSnapshot | None = None
    """As in the balance, over the last seconds."""
    speeds: list[float] = field(default_factory=list)
    """Of all ranks of a pipeline stage, in the newest batch; 1.0 is as fast as the fastest."""
    floor: float = 1.0
    """The lowest possible mean time imbalance after, as in the balance."""
    bytes_moved: int = 0
    savings: Savings | None = None
    last_batch: BatchSnapshot | None = None
    """The newest prefill batch, also from before the window."""
    ranks: list[RankHealth] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


class ReadinessRead(NamedTuple):
    """Whether the run is ready, and when that was found out."""

    problems: dict[str, str]  # as ``RunStore.problems``
    unbalanced: str  # as ``RunStore.unbalanced``
    read_at: float  # monotonic


def rank_health(view: RankView, problem: str, missed: int) -> RankHealth:
    """The health of the rank in ``view``."""
    header = view.header
    return RankHealth(
        rank=view.rank,
        pid=header.pid if header else None,
        state=header.state.name.lower() if header else "missing",
        alive=view.alive,
        problem=problem,
        heartbeat_age_seconds=view.heartbeat_age_seconds,
        last_batch_age_seconds=view.last_batch_age_seconds,
        slot_bytes=header.slot_bytes_reserved if header else 0,
        lost=header.lost if header else 0,
        missed=missed,
    )


def problem(view: RankView, num_ranks: int, unreadable: str) -> str:
    """Why the rank in ``view`` is not ready, in a run of ``num_ranks``; empty when it is.

    ``unreadable`` is the reason where it has no header.
    """
    if view.header is None:
        return unreadable
    if view.header.shape.num_ranks != num_ranks:
        return f"its ring belongs to a run of {view.header.shape.num_ranks} ranks"
    if view.header.state != RingState.READY:
        return f"state is {view.header.state.name.lower()}"
    if view.header.dead:
        return f"process {view.header.pid} has died"
    if not view.alive:
        return f"no heartbeat for {view.heartbeat_age_seconds:.1f} s"
    return "".join(filter(str.isprintable, view.header.unheard))
