"""The state of every rank, and what keeps it from being ready."""

from dataclasses import dataclass

from ultraep_serve.ring.schema import SCHEMA_VERSION, RingState
from ultraep_serve.sidecar.statistics.batches import BatchSnapshot
from ultraep_serve.sidecar.statistics.snapshot import (
    BatchesCount,
    Documented,
    PhaseSnapshot,
    RankView,
    Savings,
)

__all__ = ["Overview", "RankHealth", "RankList", "problem", "rank_health"]


@dataclass(frozen=True)
class RankHealth(Documented):
    """One rank now."""

    rank: int
    pid: int | None
    state: str
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool
    """Its heart beats and it has neither failed, stopped nor died."""
    problem: str
    """What keeps it from being ready; empty when it is."""
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
    """Is it on, is it well, what does it do: over the last seconds."""

    time_ns: int
    """Unix time of this answer."""
    ready: bool
    reasons: dict[str, str]
    """What keeps the run from being ready, by rank."""
    engine: str | None
    """Null, like all that follows but ranks, while no ring can be read."""
    mode: str | None
    policy: str | None
    """Now in force."""
    paused_policy: str | None
    """What resume puts in force again; null while not paused."""
    num_ranks: int | None
    """Of the whole group, over all hosts; ranks are those of this host."""
    num_layers: int | None
    num_experts: int | None
    num_slots: int | None
    """Replica slots per rank."""
    window_seconds: float
    batches: BatchesCount | None
    phases: dict[str, PhaseSnapshot]
    """Percentiles are off by up to a tenth of what exceeds 1: they come from a histogram."""
    floor: float
    """The least that the mean imbalance after can be, as in the balance."""
    bytes_moved: int
    savings: Savings | None
    last_batch: BatchSnapshot | None
    """The newest one that reached the planner, also before the window."""
    ranks: list[RankHealth]
    schema_version: int = SCHEMA_VERSION


def rank_health(view: RankView, problem: str, missed: int) -> RankHealth:
    """The health of the rank that ``view`` shows."""
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
    """What is wrong with the rank that ``view`` shows, in a run of ``num_ranks``; else empty.

    ``unreadable`` says why there is no header, where there is none.
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
    return ""
