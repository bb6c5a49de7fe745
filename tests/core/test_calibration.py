"""Costs measured at start-up: plausible, and the same on every rank."""

import time

import torch

from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.backend import GroupSetup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.host.backend import HostBackend
from ultraep_serve.topology import Location
from ultraep_serve.types import ExpertShape, TokenView

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)


def costs_of_rank(rank: int, run_path: str, given: str) -> CostModel:
    """What one rank decides by; its expert kernel sleeps 10 us (rank 0) or 30 us per row."""
    config = BalanceConfig(costs=given, run_dir=run_path)
    location = Location.on_one_host(rank, SHAPE.num_ranks)
    backend = HostBackend(GroupSetup(config, SHAPE, TokenView.SHARED, location))
    backend.adopt([torch.zeros(SHAPE.num_masters, 1000)])
    backend.connect()
    seconds_per_row = (1 + 2 * rank) * 1e-5
    return backend.calibrate(lambda rows: time.sleep(rows * seconds_per_row))


def test_ranks_agree_on_the_mean_of_what_they_measure() -> None:
    with fresh_run_path() as run_path:
        first, second = run_ranks(costs_of_rank, 2, str(run_path), "")
    assert first == second
    assert first.seconds_per_assignment > 0
    assert min(first.link_bytes_per_second, first.exchange_seconds, first.plan_seconds) > 0


def test_given_costs_are_taken_as_they_are() -> None:
    model = CostModel(1e-6, bytes_per_expert=1 << 20, link_bytes_per_second=1e9)
    with fresh_run_path() as run_path:
        both = run_ranks(costs_of_rank, 2, str(run_path), model.to_json())
    assert both == [model] * 2
