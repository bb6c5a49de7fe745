"""Health and balance of the last seconds, in one answer."""

from typing import Any

from pydantic import Field

from ultraep_serve.sidecar.memory import skipped_since
from ultraep_serve.sidecar.statistics.batches import BatchSnapshot, newest_batch
from ultraep_serve.sidecar.statistics.fold import imbalance_snapshot, mean_floor, rank_speeds
from ultraep_serve.sidecar.statistics.held import Held, NoRunError
from ultraep_serve.sidecar.statistics.proof import self_check_of, verification_of
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import (
    BatchesCount,
    Document,
    ImbalanceSnapshot,
    PhaseSnapshot,
    RankHealth,
    Savings,
    SelfCheckSnapshot,
    VerificationSnapshot,
)
from ultraep_serve.sidecar.statistics.summary import batches_count, phases
from ultraep_serve.sidecar.store import RunStore

__all__ = ["Overview", "RankList", "overview", "rank_list"]


class RankList(Document):
    """All ranks of this host."""

    ready: bool
    """Every rank of this host is alive and ready."""
    num_ranks: int
    """Of the whole group, over all hosts."""
    ranks: list[RankHealth]


def rank_list(held: Held) -> RankList:
    """The health of every rank of this host."""
    ranks = [view.health for view in held.views]
    ready = not any(rank.problem for rank in ranks)
    return RankList(ready=ready, num_ranks=held.header.shape.num_ranks, ranks=ranks)


class Overview(Document):
    """Health and balance over the last seconds, and the newest batch."""

    time_ns: int
    """Unix time of this answer."""
    ready: bool
    reasons: dict[str, str]
    """Why the run is not ready, by rank."""
    window_seconds: float
    unbalanced: str = ""
    """Why the server runs without balancing, as its operator allowed; else empty."""
    switched_off: str = ""
    """Why balancing has switched itself off, until somebody sets a policy; else empty."""
    engine: str | None = None
    """Null while no ring can be read, like the fields below; lists are then empty."""
    mode: str | None = None
    policy: str | None = None
    """Now in force."""
    num_ranks: int | None = None
    """Of the whole group, over all hosts; ranks are those of this host."""
    num_layers: int | None = None
    num_experts: int | None = None
    num_slots: int | None = None
    """Replica slots per rank."""
    batches: BatchesCount | None = None
    phases: dict[str, PhaseSnapshot] = Field(default_factory=dict)
    """Percentiles come from a histogram: the excess over 1 is accurate to a tenth."""
    time_imbalance: ImbalanceSnapshot | None = None
    """As in the balance, over the last seconds."""
    speeds: list[float] = Field(default_factory=list)
    """Of all ranks of a pipeline stage, in the newest batch; 1.0 is as fast as the fastest."""
    floor: float = 1.0
    """The lowest possible mean time imbalance after, as in the balance."""
    bytes_moved: int = 0
    savings: Savings | None = None
    self_check: SelfCheckSnapshot | None = None
    verification: VerificationSnapshot | None = None
    """Since the start."""
    last_batch: BatchSnapshot | None = None
    """The newest prefill batch, also from before the window."""
    ranks: list[RankHealth] = Field(default_factory=list)


def overview(store: RunStore, now_ns: int, seconds: int) -> Overview:
    """The overview over the last ``seconds`` at ``now_ns`` (Unix time); polls first."""
    run = store.poll()
    health: dict[str, Any] = {
        "time_ns": now_ns,
        "ready": run.ready,
        "reasons": {} if run.unbalanced else run.problems,
        "window_seconds": seconds,
        "unbalanced": run.unbalanced,
    }
    try:
        held = run.held()
    except NoRunError:
        return Overview(**health)
    with store.timeline() as timeline:
        totals = timeline.totals(now_ns // 10**9, seconds)
    since_ns = now_ns - seconds * 10**9
    skipped = skipped_since(held.skipped, since_ns)
    batches = {decision: count + skipped[decision] for decision, count in totals.batches.items()}
    recent = RecordSelection(since_ns).considered(held.primary)
    header = held.header
    return Overview(
        **health,
        switched_off=held.switched_off,
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        num_ranks=header.shape.num_ranks,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_replica_slots,
        batches=batches_count(batches),
        phases=phases(batches, totals.imbalance),
        time_imbalance=imbalance_snapshot(recent, "time_"),
        speeds=rank_speeds(held.primary),
        floor=mean_floor(recent),
        bytes_moved=totals.bytes_sent,
        savings=totals.savings,
        self_check=self_check_of(held.headers),
        verification=verification_of(held.headers, is_off=bool(held.switched_off)),
        last_batch=newest_batch(held),
        ranks=[view.health for view in held.views],
    )
