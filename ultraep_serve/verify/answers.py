"""What a layer answers with copies is what it answers without: ids that use copies, and a bound."""

import torch

from ultraep_serve.types import ExpertShape

__all__ = ["bound_of", "largest_difference", "using_copies"]

# Largest difference of two answers, in parts of the largest value: sums are taken in another order.
_BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3}
_BOUND = 2e-2  # of other types, which have no more bits than bfloat16


def bound_of(dtype: torch.dtype) -> float:
    """What ``largest_difference`` may be in layers of ``dtype``."""
    return _BOUNDS.get(dtype, _BOUND)


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of two outputs (T, H), in parts of the largest value expected; (), NaN where one has NaN."""
    size = expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny)
    return (found.float() - expected.float()).abs().max() / size


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
