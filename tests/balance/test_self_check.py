"""The self-check of ranks without an engine: passes where all is well, finds each fault.

A fault of the last rank is given the ``Stages`` of a rank, its sizes and the layers that its engine
computes, and returns the stages that the self-check is to see.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import Plan

from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.proof import host
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.start import Stages
from ultraep_serve.types import ExpertShape, TokenView

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()
HIDDEN, LAYERS = 16, 3
Layers = list[list[torch.nn.Parameter]]  # by layer: a matrix (N, H, H) and its scale (N, 3)
Fault = Callable[[Stages, ExpertShape, Layers], Stages]


def experts(rank: int, shape: ExpertShape, layer: int) -> list[torch.nn.Parameter]:
    """A layer's masters on one rank, (L, ...)."""
    random = torch.Generator().manual_seed(100 * layer + rank)
    sizes = ((HIDDEN, HIDDEN), (3,))
    made = [torch.randn(shape.num_masters, *size, generator=random) for size in sizes]
    return [torch.nn.Parameter(tensor, False) for tensor in made]


def engine_of(rank: int, shape: ExpertShape, layers: Layers) -> Answers:
    """An engine whose ranks have all tokens, and the sum of what they compute."""

    def compute(
        layer: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """Only this rank's part: whoever compares it sees what is computed elsewhere as missing."""
        matrix, scale = layers[layer]
        local = physical.long() - rank * shape.num_local
        own = (local >= 0) & (local < shape.num_local)
        outputs = torch.zeros_like(x)
        for token, place in own.nonzero().tolist():
            expert = local[token, place]
            outputs[token] += weights[token, place] * (x[token] @ matrix[expert]) * scale[expert, 0]
        torch.distributed.all_reduce(outputs)
        return outputs

    return Answers(compute, 2, HIDDEN, torch.float32, torch.device("cpu"), seed=0)


def replicating(fill: Callable[..., object]) -> Fault:
    """Slots are filled by ``fill`` (stages, shape, layer, slot_expert, by_relays)."""

    def fault(made: Stages, shape: ExpertShape, _: Layers) -> Stages:
        return replace(made, replicate=partial(fill, made, shape))

    return fault


def flipped_bit(made: Stages, shape: ExpertShape, layer: int, *rest: Any) -> None:
    made.replicate(layer, *rest)
    made.layers[layer].tensors[0][shape.num_masters].view(torch.uint8)[0, 0] ^= 1


def stale_scale(made: Stages, shape: ExpertShape, layer: int, *rest: Any) -> None:
    scale = made.layers[layer].tensors[1]
    before = scale[shape.num_masters].clone()
    made.replicate(layer, *rest)
    scale[shape.num_masters].copy_(before)


def never_copied(
    made: Stages, _: ExpertShape, layer: int, slot_expert: np.ndarray, by_relays: bool
) -> None:
    """The other ranks get one expert in place of another."""
    less = slot_expert.copy()
    less[:-1][less[:-1] // (less.max() + 1) == 0] = less[:-1].max()
    made.replicate(layer, less, by_relays)


def early_overwrite(made: Stages, *_: object) -> Stages:
    """Slots lose their bytes after they were looked at: at the exchange that follows."""
    filled: list[torch.Tensor] = []

    def replicate(layer: int, *rest: Any) -> None:
        made.replicate(layer, *rest)
        filled[:] = [made.layers[layer].tensors[0]]

    def gather(row: np.ndarray) -> np.ndarray:
        for tensor in filled:
            tensor[-1] = 0
        return made.gather(row)

    return replace(made, replicate=replicate, gather=gather)


def lost_assignment(made: Stages, *_: object) -> Stages:
    def count(ids: torch.Tensor) -> np.ndarray:
        load = made.count(ids)
        load[load.argmax()] -= load.any()
        return load

    return replace(made, count=count)


def routing(damage: Callable[[Plan, torch.Tensor], object]) -> Fault:
    def fault(made: Stages, *_: object) -> Stages:
        def route(*args: Any) -> tuple[Plan, torch.Tensor]:
            plan, physical = made.route(*args)
            damage(plan, physical)
            return plan, physical

        return replace(made, route=route)

    return fault


def one_more(plan: Plan, _: torch.Tensor) -> None:
    plan.quota[0, 0] += 1


def other_plan(made: Stages, *_: object) -> Stages:
    """One that is right in itself: as if every rank were a domain."""

    def route(loads: np.ndarray, context: Any, *rest: Any) -> tuple[Plan, torch.Tensor]:
        return made.route(loads, type(context).of(context.shape, 1), *rest)

    return replace(made, route=route)


def wrong_answer(made: Stages, shape: ExpertShape, layers: Layers) -> Stages:
    """The engine's kernel takes the last master for whatever lies behind the masters."""
    original = torch.Tensor.__getitem__

    class Limited(torch.nn.Parameter):
        def __getitem__(self, index: object) -> torch.Tensor:
            limit = shape.num_masters - 1
            within = min(int(index), limit) if isinstance(index, torch.Tensor) else index
            return original(self, within)

    for layer in layers:
        layer[0].__class__ = Limited
    return made


def no_number(made: Stages, _: ExpertShape, layers: Layers) -> Stages:
    """As the checkpoint has it, so that copies have it too."""
    layers[0][0][0, 0, 0] = torch.nan
    return made


_COPIES, _KERNELS = "copies failed on rank", "kernels failed on rank 2: "
_PLANNED = "a plan is another one"
FAULTS: dict[str, tuple[Fault, str]] = {  # and what the error says
    "none": (lambda made, *_: made, ""),
    "no number": (no_number, ""),
    "early overwrite": (early_overwrite, f"{_COPIES} 2"),
    "quota off by one": (routing(one_more), _KERNELS + _PLANNED),
    "flipped bit": (replicating(flipped_bit), f"{_COPIES} 2: slots of layer 0 have other bytes"),
    "stale scale": (replicating(stale_scale), f"{_COPIES} 2"),
    "never copied": (replicating(never_copied), _COPIES),
    "lost assignment": (lost_assignment, f"{_KERNELS}assignments are counted wrong"),
    "wrong id": (
        routing(lambda _, ids: ids.sub_((ids > 0).int())),
        f"{_KERNELS}an assignment went to a wrong expert",
    ),
    "other plan": (other_plan, _KERNELS + _PLANNED),
    "wrong answer": (wrong_answer, _COPIES),
}


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
    own = EngineRank("test", rank, engine_group(run_path, rank, shape.num_ranks))
    meet_in(run_path)
    config = BalanceConfig(costs=COSTS, self_check=how, timeout_seconds=30)
    layers = [experts(rank, shape, layer) for layer in range(LAYERS)]
    original = host.stages_of
    with pytest.MonkeyPatch.context() as patch:
        if rank == shape.num_ranks - 1:
            faulty, _ = FAULTS[fault]
            patch.setattr(host, "stages_of", lambda made: faulty(original(made), shape, layers))
        answers = engine_of(rank, shape, layers)
        if of_float16:
            for matrix, _ in layers:
                matrix *= of_float16
            answers = replace(answers, compute=rounded(answers), dtype=torch.float16)
        described = MovableLayers(layers, shape, TokenView.SHARED, lambda _: None, answers)
        joined = BalancedLayers(config, own, described)
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


@pytest.mark.parametrize("fault", [name for name, (_, said) in FAULTS.items() if said])
def test_every_fault_is_found_and_refused_by_all_ranks(run_path: Path, fault: str) -> None:
    outcomes = outcomes_of_ranks(join, 3, run_path, ExpertShape(3, 9, 2), fault, "quick")
    assert [outcome.error for outcome in outcomes] == ["SelfCheckError"] * 3, outcomes
    assert any(FAULTS[fault][1] in outcome.message for outcome in outcomes), outcomes


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
