"""Ranks that check themselves without an engine, and what may be wrong with the last of them.

A fault is given the ``Stages`` of a rank, its sizes and the layers that its engine computes, and
returns the stages that the self-check is to see.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from ultraep_kernels.contract import Plan

from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.start import Stages
from ultraep_serve.types import ExpertShape

__all__ = ["FAULTS", "FOUND", "HIDDEN", "LAYERS", "Layers", "engine_of", "experts"]

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


def after_copying(damage: Callable[[Stages, ExpertShape, int], object]) -> Fault:
    """A fault that does ``damage`` (stages, shape, layer) whenever slots were filled."""

    def fill(made: Stages, shape: ExpertShape, layer: int, *rest: Any) -> None:
        made.replicate(layer, *rest)
        damage(made, shape, layer)

    return replicating(fill)


def flipped_bit(made: Stages, shape: ExpertShape, layer: int) -> None:
    made.layers[layer].tensors[0][shape.num_masters].view(torch.uint8)[0, 0] ^= 1


def slots_swapped(made: Stages, _: ExpertShape, layer: int) -> None:
    for tensor in made.layers[layer].tensors:
        tensor[-2:] = tensor[-2:].flip(0)


def copy_cut_short(made: Stages, _: ExpertShape, layer: int) -> None:
    """The last bytes of the last slot stay what they were before."""
    made.layers[layer].tensors[-1][-1].view(torch.uint8)[-4:] = 0xA5


def wrong_expert(made: Stages, _: ExpertShape, layer: int) -> None:
    for tensor in made.layers[layer].tensors:
        tensor[-1] = tensor[0]


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


def other_layer(made: Stages, _: ExpertShape, layer: int, *rest: Any) -> None:
    made.replicate((layer + 1) % LAYERS, *rest)


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


def counting(damage: Callable[[np.ndarray], np.ndarray]) -> Fault:
    def fault(made: Stages, *_: object) -> Stages:
        return replace(made, count=lambda ids: damage(made.count(ids)))

    return fault


def one_less(load: np.ndarray) -> np.ndarray:
    load[load.argmax()] -= load.any()
    return load


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
_COUNTED, _WENT = "assignments are counted wrong", "an assignment went to a wrong expert"
_PLANNED = "a plan is another one"
_FAULTS: dict[str, tuple[Fault, str]] = {  # and what the error says
    "slots swapped": (after_copying(slots_swapped), f"{_COPIES} 2"),
    "copy cut short": (after_copying(copy_cut_short), f"{_COPIES} 2"),
    "wrong expert copied": (after_copying(wrong_expert), f"{_COPIES} 2"),
    "early overwrite": (early_overwrite, f"{_COPIES} 2"),
    "doubled assignment": (counting(lambda load: load * 2), _KERNELS + _COUNTED),
    "lost id": (routing(lambda _, ids: ids.view(-1)[:1].fill_(-1)), _KERNELS + _WENT),
    "quota off by one": (routing(one_more), _KERNELS + _PLANNED),
    "flipped bit": (after_copying(flipped_bit), f"{_COPIES} 2: slots of layer 0 have other bytes"),
    "stale scale": (replicating(stale_scale), f"{_COPIES} 2"),
    "never copied": (replicating(never_copied), _COPIES),
    "another layer": (replicating(other_layer), _COPIES),
    "lost assignment": (counting(one_less), _KERNELS + _COUNTED),
    "wrong id": (routing(lambda _, ids: ids.sub_((ids > 0).int())), _KERNELS + _WENT),
    "other plan": (other_plan, _KERNELS + _PLANNED),
    "wrong answer": (wrong_answer, _COPIES),
}
FOUND = {name: said for name, (_, said) in _FAULTS.items()}
FAULTS: dict[str, Fault] = {
    "none": lambda made, *_: made,
    "no number": no_number,
    **{name: fault for name, (fault, _) in _FAULTS.items()},
}
