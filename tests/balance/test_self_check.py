"""The self-check of ranks without an engine: passes where all is well, finds each fault."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks import outcomes_of_ranks, run_ranks
from tests.support.self_check_faults import (
    FAULTS,
    FOUND,
    LAYERS,
    MOST_TOKENS,
    engine_of,
    experts,
)
from ultraep_serve.balance.backend import Stages
from ultraep_serve.balance.host.backend import HostBackend
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.setup import BalancedLayers, EngineRank
from ultraep_serve.types import ExpertShape, TokenView

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()


def join(rank: int, run_path: Path, shape: ExpertShape, fault: str, how: str) -> list[str]:
    """Names of the checks that were passed, with ``fault`` on the last rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
    )
    config = BalanceConfig(run_dir=str(run_path), costs=COSTS, self_check=how, timeout_seconds=30)
    layers = [experts(rank, shape, layer) for layer in range(LAYERS)]
    original = HostBackend.stages

    def stages(backend: HostBackend) -> Stages:
        return FAULTS[fault](original(backend), shape, layers)

    with pytest.MonkeyPatch.context() as patch:
        if rank == shape.num_ranks - 1:
            patch.setattr(HostBackend, "stages", stages)
        own = EngineRank("test", rank, answers=engine_of(rank, shape, layers))
        joined = BalancedLayers(config, shape, TokenView.SHARED, layers, lambda _: None, own)
    torch.distributed.destroy_process_group()
    return [check.name for check in joined.self_check.checks]


@pytest.mark.parametrize("how", ["off", "quick", "full"])
@pytest.mark.parametrize(
    "shape", [ExpertShape(2, 8, 1), ExpertShape(3, 9, 2), ExpertShape(2, 4, 0)]
)
def test_ranks_without_a_fault_pass(run_path: Path, shape: ExpertShape, how: str) -> None:
    passed = run_ranks(join, shape.num_ranks, run_path, shape, "none", how)
    expected = ["kernels", "slots", "answers"] if shape.num_replica_slots else ["kernels"]
    assert passed == [expected if how != "off" else []] * shape.num_ranks


@pytest.mark.parametrize("fault", FOUND)
def test_every_fault_is_found_and_refused_by_all_ranks(run_path: Path, fault: str) -> None:
    outcomes = outcomes_of_ranks(join, 3, run_path, ExpertShape(3, 9, 2), fault, "quick")
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 3, outcomes
    assert any(FOUND[fault] in outcome.message for outcome in outcomes), outcomes


def join_with_a_short_kernel(rank: int, run_path: Path, shape: ExpertShape, how: str) -> str:
    """What the self-check has done, where the last rank's kernel ends after so many rows."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
    )
    layers = [experts(rank, shape, layer) for layer in range(LAYERS)]
    right = engine_of(rank, shape, layers)

    def compute(layer: int, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        outputs = right.compute(layer, x, *rest)
        outputs[MOST_TOKENS - 1 :] *= 1 + (rank == shape.num_ranks - 1)
        return outputs

    config = BalanceConfig(run_dir=str(run_path), costs=COSTS, self_check=how, timeout_seconds=30)
    own = EngineRank("test", rank, answers=replace(right, compute=compute))
    joined = BalancedLayers(config, shape, TokenView.SHARED, layers, lambda _: None, own)
    torch.distributed.destroy_process_group()
    return joined.self_check.checks[-1].name


def test_a_full_check_has_the_engine_compute_its_largest_batch(run_path: Path) -> None:
    shape = ExpertShape(2, 8, 1)
    (run_path / "quick").mkdir()
    quick = run_ranks(join_with_a_short_kernel, 2, run_path / "quick", shape, "quick")
    assert quick == ["answers"] * 2
    outcomes = outcomes_of_ranks(join_with_a_short_kernel, 2, run_path, shape, "full")
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 2, outcomes
    assert any("in a batch of 50 tokens" in outcome.message for outcome in outcomes)
