"""What is shown first: health, balance over the last seconds, the newest batch."""

import time

from ultraep_serve.ring.schema import RecordArray
from ultraep_serve.sidecar.health import Overview
from ultraep_serve.sidecar.statistics.batches import BatchSnapshot, batch_snapshot
from ultraep_serve.sidecar.statistics.snapshot import mean_floor
from ultraep_serve.sidecar.statistics.summary import batches_count, phases
from ultraep_serve.sidecar.statistics.window import Window
from ultraep_serve.sidecar.store import NoRunError, RunStore

__all__ = ["overview"]


def overview(store: RunStore, seconds: int) -> Overview:
    """The overview over the last ``seconds``; polls first."""
    store.poll()
    now_ns = time.time_ns()
    try:
        header, health = store.header(), store.ranks()
        (_, primary, own), totals = store.held(), store.totals(now_ns, seconds)
    except NoRunError:
        return _nothing(store, now_ns, seconds)
    paused = store.control().paused
    recent = Window(now_ns - seconds * 10**9).weighed(primary)
    return Overview(
        time_ns=now_ns,
        ready=health.ready,
        reasons={str(rank.rank): rank.problem for rank in health.ranks if rank.problem},
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        paused_policy=paused.value if paused else None,
        num_ranks=header.shape.num_ranks,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_replica_slots,
        window_seconds=seconds,
        batches=batches_count(totals.batches),
        phases=phases(totals.batches, totals.imbalance),
        floor=mean_floor(recent["load_before"], header.location.domain_size),
        bytes_moved=totals.bytes_sent,
        savings=totals.savings,
        last_batch=_newest(primary, own),
        ranks=health.ranks,
    )


def _newest(primary: RecordArray, own: list[RecordArray]) -> BatchSnapshot | None:
    if not len(primary):
        return None
    number = primary["batch"][-1]
    sent = (records["bytes_sent"][records["batch"] == number].sum() for records in own)
    return batch_snapshot(primary[primary["batch"] == number], int(sum(sent)))


def _nothing(store: RunStore, now_ns: int, seconds: int) -> Overview:
    return Overview(
        time_ns=now_ns,
        ready=False,
        reasons=store.problems(),
        engine=None,
        mode=None,
        policy=None,
        paused_policy=None,
        num_ranks=None,
        num_layers=None,
        num_experts=None,
        num_slots=None,
        window_seconds=seconds,
        batches=None,
        phases={},
        floor=1.0,
        bytes_moved=0,
        savings=None,
        last_batch=None,
        ranks=[],
    )
