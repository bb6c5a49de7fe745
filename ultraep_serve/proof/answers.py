"""What a layer answers with copies is what it answers without: tokens, ids and a bound."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ultraep_serve.types import ExpertShape

# Largest difference of two answers, in parts of a token's largest value: sums are taken in another
# order.
_BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3}
_BOUND = 2e-2  # of other types, which have no more bits than bfloat16
# Of made-up tokens. What a layer sees may be much smaller than 1, and what is larger may overflow.
_SIZES = (1.0, 2.0**-4, 2.0**-8, 2.0**-12)


@dataclass(frozen=True)
class Answers:
    """How the engine computes a layer outside of a batch of its own; all ranks call it alike."""

    # layer, x (T, H), weights (T, K), physical ids (T, K) int32 -> outputs (T, H)
    compute: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    experts_per_token: int  # K
    hidden_size: int  # H
    dtype: torch.dtype
    device: torch.device
    seed: int  # of this rank's tokens; the same on all ranks where they see the same ones


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of two outputs (T, H), in parts of a token's largest value expected; (), NaN for no number.

    Tokens for which NaN or inf is expected say nothing.
    """
    found, expected = found.float(), expected.float()
    size = expected.abs().amax(dim=1).clamp(min=torch.finfo(torch.float16).tiny)
    apart = (found - expected).abs().amax(dim=1) / size
    return torch.where(expected.isfinite().all(dim=1), apart, 0).amax()


def using_copies(
    logical: torch.Tensor, slot_expert: torch.Tensor | None, shape: ExpertShape
) -> torch.Tensor:
    """Physical ids (T, K) int32 of masters, and of copies of those experts that have one.

    ``slot_expert`` (R, S or fewer) on the device of ``logical``; None: no copies.
    """
    every = torch.arange(shape.num_logical_experts, device=logical.device)
    chosen = every // shape.num_masters * shape.num_local + every % shape.num_masters
    if slot_expert is not None:
        ranks = torch.arange(shape.num_ranks, device=logical.device)[:, None]
        slots = torch.arange(slot_expert.shape[1], device=logical.device)
        places = ranks * shape.num_local + shape.num_masters + slots
        held = torch.where(slot_expert >= 0, slot_expert.long(), every.numel())  # one more
        copies = chosen.new_full((every.numel() + 1,), -1)
        copies.scatter_reduce_(0, held.view(-1), places.view(-1), "amax")
        chosen = torch.where(copies[:-1] >= 0, copies[:-1], chosen)
    return chosen.int()[logical]


class AnswerCheck:
    """Tokens that the engine computes by masters, and again by copies; all ranks do it together."""

    def __init__(self, shape: ExpertShape, answers: Answers, num_experts: int) -> None:
        """``num_experts`` are chosen in all, each by tokens of every size."""
        self._shape, self._answers = shape, answers
        self.bound = _BOUNDS.get(answers.dtype, _BOUND)  # of ``largest_difference``
        top_k, random = answers.experts_per_token, torch.Generator().manual_seed(answers.seed)
        each = -(-num_experts // top_k)  # tokens of a size
        sizes = torch.tensor(_SIZES).repeat_interleave(each)[:, None]
        x = torch.randn(len(sizes), answers.hidden_size, generator=random) * sizes
        weights = torch.rand(len(sizes), top_k, generator=random) + 0.5
        turns = torch.arange(each * top_k).view(each, top_k).repeat(len(_SIZES), 1)
        self._x = x.to(answers.device, answers.dtype)
        self._weights = (weights / weights.sum(dim=1, keepdim=True)).to(answers.device)
        self._turns = turns.to(answers.device) % shape.num_logical_experts

    def outputs(
        self, layer: int, slot_expert: torch.Tensor | None, order: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Outputs (T, H) by copies where ``slot_expert`` (R, S) has them; None: by masters.

        The first experts of ``order`` (E,) are chosen; None: as they are numbered.
        """
        slots = None if slot_expert is None else slot_expert.to(self._x.device)
        logical = self._turns if order is None else order[self._turns]
        physical = using_copies(logical, slots, self._shape)
        return self._answers.compute(layer, self._x, self._weights, physical)

    def is_wrong(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Whether answers by the copies in ``slots`` (R, S) differ more than they may; bool ()."""
        experts = self._shape.num_logical_experts
        is_copied = torch.zeros(experts + 1, dtype=torch.int32, device=slots.device)
        is_copied[torch.where(slots >= 0, slots, experts)] = 1
        copied_first = is_copied[:-1].argsort(descending=True, stable=True)
        expected = self.outputs(layer, None, copied_first)
        found = self.outputs(layer, slots, copied_first)
        return ~(largest_difference(found, expected) <= self.bound)  # also where it is no number

    def says_nothing(self, expected: torch.Tensor) -> bool:
        """Whether some experts give no finite numbers, however small their tokens are."""
        is_finite = expected.isfinite().all(dim=1).view(len(_SIZES), -1)
        return not bool(is_finite.any(dim=0).all())
