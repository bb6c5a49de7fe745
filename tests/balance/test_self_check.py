"""The self-check of ranks without an engine: passes where all is well, finds each fault."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import Plan

from tests.support.ranks import outcomes_of_ranks, run_ranks
from ultraep_serve.balance.backend import Answers, Stages
from ultraep_serve.balance.host.backend import HostBackend
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.setup import BalancedLayers, EngineRank
from ultraep_serve.types import ExpertShape, TokenView

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()
HIDDEN, LAYERS = 16, 3


def experts(rank: int, shape: ExpertShape, layer: int) -> list[torch.nn.Parameter]:
    """A layer's experts on one rank: a matrix (L, H, H) and its scale (L, 3)."""
    random = torch.Generator().manual_seed(100 * layer + rank)
    sizes = ((HIDDEN, HIDDEN), (3,))
    made = [torch.randn(shape.num_masters, *size, generator=random) for size in sizes]
    return [torch.nn.Parameter(tensor, False) for tensor in made]


def engine_of(rank: int, shape: ExpertShape, layers: list[list[torch.nn.Parameter]]) -> Answers:
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
        return shared_sum(outputs)

    return Answers(compute, 2, HIDDEN, torch.float32, torch.device("cpu"), seed=0)


def shared_sum(outputs: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(outputs)
    return outputs


def join(rank: int, run_path: Path, shape: ExpertShape, fault: str, how: str) -> list[str]:
    """Names of the checks that were passed, with ``fault`` on the last rank."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
    )
    config = BalanceConfig(run_dir=str(run_path), costs=COSTS, self_check=how, timeout_seconds=30)
    layers = [experts(rank, shape, layer) for layer in range(LAYERS)]
    answers = engine_of(rank, shape, layers)
    with pytest.MonkeyPatch.context() as patch:
        if rank == shape.num_ranks - 1:
            FAULTS[fault](patch, shape, layers)
        own = EngineRank("test", rank, answers=answers)
        joined = BalancedLayers(config, shape, TokenView.SHARED, layers, lambda _: None, own)
    torch.distributed.destroy_process_group()
    return [check.name for check in joined.self_check.checks]


def change(patch: pytest.MonkeyPatch, **changed: object) -> None:
    """Stages of this rank with some of them replaced by what is made of them."""
    original = HostBackend.stages

    def stages(backend: HostBackend) -> Stages:
        made = original(backend)
        parts = {name: make(made) for name, make in changed.items()}
        return Stages(**{**vars(made), **parts})

    patch.setattr(HostBackend, "stages", stages)


def flipped_bit(patch: pytest.MonkeyPatch, shape: ExpertShape, _: object) -> None:
    def make(made: Stages) -> object:
        def replicate(layer: int, slot_expert: np.ndarray, parents: np.ndarray) -> None:
            made.replicate(layer, slot_expert, parents)
            made.layers[layer].tensors[0][shape.num_masters].view(torch.uint8)[0, 0] ^= 1

        return replicate

    change(patch, replicate=make)


def stale_scale(patch: pytest.MonkeyPatch, shape: ExpertShape, _: object) -> None:
    def make(made: Stages) -> object:
        def replicate(layer: int, slot_expert: np.ndarray, parents: np.ndarray) -> None:
            scale = made.layers[layer].tensors[1]
            before = scale[shape.num_masters].clone()
            made.replicate(layer, slot_expert, parents)
            scale[shape.num_masters].copy_(before)

        return replicate

    change(patch, replicate=make)


def never_copied(patch: pytest.MonkeyPatch, *_: object) -> None:
    def make(made: Stages) -> object:
        def replicate(layer: int, slot_expert: np.ndarray, parents: np.ndarray) -> None:
            less = slot_expert.copy()
            less[:-1][less[:-1] // (less.max() + 1) == 0] = less[:-1].max()  # others get one expert
            made.replicate(layer, less, parents)

        return replicate

    change(patch, replicate=make)


def other_layer(patch: pytest.MonkeyPatch, *_: object) -> None:
    change(
        patch,
        replicate=lambda made: lambda layer, *rest: made.replicate((layer + 1) % LAYERS, *rest),
    )


def lost_assignment(patch: pytest.MonkeyPatch, *_: object) -> None:
    def make(made: Stages) -> object:
        def count(ids: torch.Tensor) -> np.ndarray:
            load = made.count(ids)
            load[load.argmax()] -= load.any()
            return load

        return count

    change(patch, count=make)


def wrong_id(patch: pytest.MonkeyPatch, shape: ExpertShape, _: object) -> None:
    def make(made: Stages) -> object:
        def reroute(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
            physical = made.reroute(ids, plan)
            physical[physical == 0] = 1
            return physical

        return reroute

    change(patch, reroute=make)


def other_plan(patch: pytest.MonkeyPatch, *_: object) -> None:
    """One that is right in itself: made for other loads that add up to the same."""

    def make(made: Stages) -> object:
        def plan(loads: np.ndarray, context: object, source: int) -> Plan:
            return made.plan(loads, type(context).of(context.shape, 1), source)

        return plan

    change(patch, plan=make)


def wrong_answer(
    patch: pytest.MonkeyPatch, shape: ExpertShape, layers: list[list[torch.nn.Parameter]]
) -> None:
    """The engine's kernel takes the first master for whatever lies behind the masters."""
    change(patch)
    original = torch.Tensor.__getitem__

    class Limited(torch.nn.Parameter):
        def __getitem__(self, index: object) -> torch.Tensor:
            limit = shape.num_masters - 1
            within = min(int(index), limit) if isinstance(index, torch.Tensor) else index
            return original(self, within)

    for layer in layers:
        layer[0].__class__ = Limited


def after_copying(damage: Callable[[Stages, int, np.ndarray], None]) -> Callable[..., None]:
    """A fault that does ``damage`` (stages, layer, slot_expert) whenever slots were filled."""

    def fault(patch: pytest.MonkeyPatch, *_: object) -> None:
        def make(made: Stages) -> object:
            def replicate(layer: int, slot_expert: np.ndarray, parents: np.ndarray) -> None:
                made.replicate(layer, slot_expert, parents)
                damage(made, layer, slot_expert)

            return replicate

        change(patch, replicate=make)

    return fault


def slots_swapped(made: Stages, layer: int, slot_expert: np.ndarray) -> None:
    for tensor in made.layers[layer].tensors:
        tensor[-2:] = tensor[-2:].flip(0)


def copy_cut_short(made: Stages, layer: int, slot_expert: np.ndarray) -> None:
    """The last bytes of the last slot stay what they were before."""
    made.layers[layer].tensors[-1][-1].view(torch.uint8)[-4:] = 0xA5


def wrong_expert(made: Stages, layer: int, slot_expert: np.ndarray) -> None:
    for tensor in made.layers[layer].tensors:
        tensor[-1] = tensor[0]


def early_overwrite(patch: pytest.MonkeyPatch, *_: object) -> None:
    """Slots lose their bytes after they were looked at: at the exchange that follows."""
    filled: list[torch.Tensor] = []

    def copying(made: Stages) -> object:
        def replicate(layer: int, slot_expert: np.ndarray, parents: np.ndarray) -> None:
            made.replicate(layer, slot_expert, parents)
            filled[:] = [made.layers[layer].tensors[0]]

        return replicate

    def gathering(made: Stages) -> object:
        def gather(row: np.ndarray) -> np.ndarray:
            for tensor in filled:
                tensor[-1] = 0
            return made.gather(row)

        return gather

    change(patch, replicate=copying, gather=gathering)


def doubled_assignment(patch: pytest.MonkeyPatch, *_: object) -> None:
    def make(made: Stages) -> object:
        return lambda ids: made.count(ids) * 2

    change(patch, count=make)


def lost_id(patch: pytest.MonkeyPatch, *_: object) -> None:
    def make(made: Stages) -> object:
        def reroute(ids: torch.Tensor, plan: Plan) -> torch.Tensor:
            physical = made.reroute(ids, plan)
            physical.view(-1)[:1] = -1
            return physical

        return reroute

    change(patch, reroute=make)


def quota_off_by_one(patch: pytest.MonkeyPatch, *_: object) -> None:
    def make(made: Stages) -> object:
        def plan(loads: np.ndarray, context: object, source: int) -> Plan:
            found = made.plan(loads, context, source)
            found.quota[0, 0] += 1
            return found

        return plan

    change(patch, plan=make)


FAULTS = {
    "none": lambda *_: None,
    "slots swapped": after_copying(slots_swapped),
    "copy cut short": after_copying(copy_cut_short),
    "wrong expert copied": after_copying(wrong_expert),
    "early overwrite": early_overwrite,
    "doubled assignment": doubled_assignment,
    "lost id": lost_id,
    "quota off by one": quota_off_by_one,
    "flipped bit": flipped_bit,
    "stale scale": stale_scale,
    "never copied": never_copied,
    "another layer": other_layer,
    "lost assignment": lost_assignment,
    "wrong id": wrong_id,
    "other plan": other_plan,
    "wrong answer": wrong_answer,
}
FOUND = {
    "slots swapped": "slots failed on rank 2",
    "copy cut short": "slots failed on rank 2",
    "wrong expert copied": "slots failed on rank 2",
    "early overwrite": "slots failed on rank 2",
    "doubled assignment": "kernels failed on rank 2: assignments are counted wrong",
    "lost id": "kernels failed on rank 2: an assignment went to a wrong expert",
    "quota off by one": "kernels failed on rank 2: broken plan",
    "flipped bit": "slots failed on rank 2: slot 0 of layer 0 has other bytes",
    "stale scale": "slots failed on rank 2",
    "never copied": "slots failed on rank",
    "another layer": "slots failed on rank",
    "lost assignment": "kernels failed on rank 2: assignments are counted wrong",
    "wrong id": "kernels failed on rank 2: an assignment went to a wrong expert",
    "other plan": "kernels failed on rank",
    "wrong answer": "answers failed on rank",
}


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
