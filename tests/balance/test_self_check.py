"""The self-check of ranks without an engine: passes where all is well, finds each fault."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks import outcomes_of_ranks, run_ranks
from tests.support.self_check_faults import FAULTS, FOUND, LAYERS, engine_of, experts
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.proof import host
from ultraep_serve.proof.answers import Answers
from ultraep_serve.types import ExpertShape, TokenView

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()


def join(
    rank: int,
    run_path: Path,
    shape: ExpertShape,
    fault: str,
    how: str = "quick",
    of_float16: float = 0.0,
) -> list[tuple[str, str]]:
    """Checks that were passed, and what they warn of, with ``fault`` on the last rank.

    ``of_float16``: the engine computes in float16, and weights are so many times as large.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
    )
    config = BalanceConfig(run_dir=str(run_path), costs=COSTS, self_check=how, timeout_seconds=30)
    layers = [experts(rank, shape, layer) for layer in range(LAYERS)]
    original = host.stages_of
    with pytest.MonkeyPatch.context() as patch:
        if rank == shape.num_ranks - 1:
            faulty = FAULTS[fault]
            patch.setattr(host, "stages_of", lambda made: faulty(original(made), shape, layers))
        answers = engine_of(rank, shape, layers)
        if of_float16:
            for matrix, _ in layers:
                matrix *= of_float16
            answers = replace(answers, compute=rounded(answers), dtype=torch.float16)
        described = MovableLayers(layers, shape, TokenView.SHARED, lambda _: None, answers)
        joined = BalancedLayers(config, EngineRank("test", rank), described)
    torch.distributed.destroy_process_group()
    return [(check.name, check.warning) for check in joined.self_check.checks]


def rounded(answers: Answers) -> Callable[..., torch.Tensor]:
    """What ``answers`` computes, in float16."""
    return lambda layer, x, *rest: answers.compute(layer, x.float(), *rest).half()


@pytest.mark.parametrize("how", ["off", "quick", "full"])
@pytest.mark.parametrize(
    "shape", [ExpertShape(2, 8, 1), ExpertShape(3, 9, 2), ExpertShape(2, 4, 0)]
)
def test_ranks_without_a_fault_pass(run_path: Path, shape: ExpertShape, how: str) -> None:
    passed = run_ranks(join, shape.num_ranks, run_path, shape, "none", how)
    expected = [("kernels", ""), ("copies", "")] if how != "off" else []
    if not shape.num_replica_slots:
        no_room = "without replica slots there is no room for copies; choose --slots 1 or more"
        expected = [*expected[:1], ("settings", no_room)]
    assert passed == [expected] * shape.num_ranks


@pytest.mark.parametrize("fault", FOUND)
def test_every_fault_is_found_and_refused_by_all_ranks(run_path: Path, fault: str) -> None:
    outcomes = outcomes_of_ranks(join, 3, run_path, ExpertShape(3, 9, 2), fault, "quick")
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 3, outcomes
    assert any(FOUND[fault] in outcome.message for outcome in outcomes), outcomes


SMALL = ExpertShape(2, 4, 1)


def test_tokens_that_overflow_with_experts_at_home_say_nothing_about_copies(run_path: Path) -> None:
    """Made-up tokens are larger than those that the layer sees."""
    passed = run_ranks(join, 2, run_path, SMALL, "none", "quick", 3e4)
    assert passed == [[("kernels", ""), ("copies", "")]] * 2


def test_smaller_tokens_still_find_a_fault(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(join, 2, run_path, SMALL, "wrong answer", "quick", 3e4)
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 2, outcomes
    assert any("computed by copies differs by" in outcome.message for outcome in outcomes)


def test_answers_that_are_never_finite_cannot_be_checked(run_path: Path) -> None:
    passed = run_ranks(join, 2, run_path, SMALL, "none", "quick", 1e12)
    for _, (name, warning) in passed:
        assert name == "copies"
        assert warning.startswith("answers cannot be checked here: layer")


def test_a_checkpoint_with_nan_is_named_as_the_reason(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(join, 2, run_path, SMALL, "no number")
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 2, outcomes
    reason = "layer 0 gives NaN with its experts at home: the checkpoint has NaN or inf; use anothe"
    for outcome in outcomes:  # also of rank 0, whose own experts have none
        assert f"failed on rank 1: {reason}" in outcome.message, outcomes
        assert "on_unsupported" not in outcome.message
