"""What is shown first: health, balance over the last seconds, the newest batch."""

import time
from pathlib import Path

import numpy as np

from ultraep_serve.observability import Window
from ultraep_serve.observability.batches import batch_snapshots
from ultraep_serve.observability.snapshot import DOMAIN_FLOOR
from ultraep_serve.sidecar.health import Overview
from ultraep_serve.sidecar.paused import paused_policy
from ultraep_serve.sidecar.store import NoRunError, RunStore

__all__ = ["overview"]


def overview(store: RunStore, run_dir: Path, seconds: int) -> Overview:
    """The overview over the last ``seconds``; polls first."""
    store.poll()
    now_ns = time.time_ns()
    try:
        header, health = store.header(), store.ranks()
        balance = store.snapshot(Window(now_ns - seconds * 10**9))
        _, lead, own = store.held()
    except NoRunError:
        return _nothing(store, now_ns, seconds)
    if len(lead):
        lead = lead[lead["batch"] == lead["batch"][-1]]
        own = [records[records["batch"] == np.uint64(lead["batch"][-1])] for records in own]
    newest = batch_snapshots(lead, own, limit=1).batches
    paused = paused_policy(run_dir)
    return Overview(
        time_ns=now_ns,
        ready=health.ready,
        reasons=store.problems(),
        engine=header.engine,
        mode=header.mode,
        policy=header.policy.value,
        paused_policy=paused.value if paused else None,
        num_layers=header.num_layers,
        num_experts=header.shape.num_logical_experts,
        num_slots=header.shape.num_replica_slots,
        window_seconds=seconds,
        batches=balance.batches,
        phases=balance.phases,
        floor=balance.floor,
        bytes_moved=balance.bytes_moved,
        savings=balance.savings,
        last_batch=newest[0] if newest else None,
        ranks=health.ranks,
    )


def _nothing(store: RunStore, now_ns: int, seconds: int) -> Overview:
    return Overview(
        time_ns=now_ns,
        ready=False,
        reasons=store.problems(),
        engine=None,
        mode=None,
        policy=None,
        paused_policy=None,
        num_layers=None,
        num_experts=None,
        num_slots=None,
        window_seconds=seconds,
        batches=None,
        phases={},
        floor=DOMAIN_FLOOR,
        bytes_moved=0,
        savings=None,
        last_batch=None,
        ranks=[],
    )
