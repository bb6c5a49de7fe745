"""Rows of other domains: all of them, in order, and a typed error where a rank is gone."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import torch

from tests.support.hosts import engine_group, host_path
from tests.support.ranks import outcomes_of_ranks
from ultraep_serve.balance.collectives import DeviceAllGather, HostAllGather
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.system.topology import Location

WIDTH, LONG, RANKS = 5, 60.0, 4


def join(rank: int, run_path: Path, seconds: float) -> HostFabric:
    """Four ranks in two domains of two."""
    location = Location(rank, RANKS, 2, 2)
    all_gather = HostAllGather(engine_group(run_path, rank, RANKS).on_host, seconds)
    pool = SlotPool(HostMemory(), 0, 4096)
    path = host_path(run_path, location)
    return HostFabric(path, location, WIDTH, pool, 0, seconds, all_gather)


def die(rank: int, run_path: Path) -> None:
    fabric = join(rank, run_path, LONG)
    for epoch in range(100):
        if rank == 3 and epoch == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.exchange(np.zeros(WIDTH, np.int64))


def test_a_killed_rank_of_another_domain_is_noticed(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(die, RANKS, run_path, timeout_seconds=LONG / 2)
    assert outcomes[3].signal == signal.SIGKILL
    assert {outcome.error for outcome in outcomes[:3]} == {"PeerTimeoutError"}
    for outcome in outcomes[:2]:
        assert "rows of other domains" in outcome.message
        assert "restart the engine on all hosts" in outcome.message
    assert not multiprocessing.active_children()


def lose_on_device(rank: int, run_path: Path) -> None:
    all_gather = DeviceAllGather(engine_group(run_path, rank, 2).on_device)
    for _ in range(2):
        all_gather.gather(torch.zeros(3, dtype=torch.int32))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_group_that_reports_a_lost_rank_is_a_typed_error(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(lose_on_device, 2, run_path, timeout_seconds=LONG / 2)
    assert outcomes[0].error == "PeerTimeoutError", outcomes[0]
