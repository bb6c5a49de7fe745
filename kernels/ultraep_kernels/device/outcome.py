"""outcome: plan -> what the host records of a layer, packed so that one small copy takes it there.

One launch of one program. Loads after balancing follow from what is packed: what a slot computes,
its expert's master does not.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from ultraep_kernels.contract import POLICY
from ultraep_kernels.device.plan import DevicePlan

__all__ = ["Outcome", "outcome_width", "pack_outcome", "unpack_outcome"]

_HEAD = 2  # decision and policy
_HEAD_WIDTH, _POLICY = tl.constexpr(_HEAD), tl.constexpr(POLICY)
_BLOCK = 1024


@dataclass(frozen=True)
class Outcome:
    """One layer of one batch, on the host."""

    decision: int  # number of a Decision
    policy: int  # code of a Policy: rank 0's
    expert_load: NDArray[np.int32]  # (E,) assignments over all ranks
    slot_expert: NDArray[np.int32]  # (R, S), -1 empty
    slot_load: NDArray[np.int32]  # (R, S) assignments that each slot computes
    speeds: NDArray[np.int32]  # (R,) that were planned with


@triton.jit
def _outcome_kernel(
    decision_ptr,  # (1,) int32
    rows_ptr,  # (R, .) int32
    expert_load_ptr,  # (E,) int32
    slot_expert_ptr,  # (R, S) int32
    quota_ptr,  # (E, R) int32
    speeds_ptr,  # (R,) int32
    out_ptr,  # (2 + R + E + 2 * R * S,) int32
    count,  # R * S
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,  # at least 1
    BLOCK: tl.constexpr,
):
    tl.store(out_ptr, tl.load(decision_ptr))
    tl.store(out_ptr + 1, tl.load(rows_ptr + _POLICY))
    for start in range(0, NUM_RANKS, BLOCK):
        ranks = start + tl.arange(0, BLOCK)
        speeds = tl.load(speeds_ptr + ranks, mask=ranks < NUM_RANKS, other=0)
        tl.store(out_ptr + _HEAD_WIDTH + ranks, speeds, mask=ranks < NUM_RANKS)
    loads_ptr = out_ptr + _HEAD_WIDTH + NUM_RANKS
    places_ptr = loads_ptr + NUM_EXPERTS
    for start in range(0, NUM_EXPERTS, BLOCK):
        experts = start + tl.arange(0, BLOCK)
        mask = experts < NUM_EXPERTS
        load = tl.load(expert_load_ptr + experts, mask=mask, other=0)
        tl.store(loads_ptr + experts, load, mask=mask)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        mask = places < count
        held = tl.load(slot_expert_ptr + places, mask=mask, other=-1)
        quota_ptrs = quota_ptr + held * NUM_RANKS + places // NUM_SLOTS
        load = tl.load(quota_ptrs, mask=held >= 0, other=0)
        tl.store(places_ptr + places, held, mask=mask)
        tl.store(places_ptr + count + places, load, mask=mask)


def outcome_width(num_experts: int, num_ranks: int, num_slots: int) -> int:
    """int32 in a packed outcome."""
    return _HEAD + num_ranks + num_experts + 2 * num_ranks * num_slots


def pack_outcome(plan: DevicePlan, rows: torch.Tensor, speeds: torch.Tensor) -> torch.Tensor:
    """(``outcome_width``,) int32 on the device, of ``plan`` and the ``rows`` and ``speeds`` (R,)
    it was made of."""
    num_ranks, num_slots = plan.slot_expert.shape
    num_experts = plan.expert_load.numel()
    width = outcome_width(num_experts, num_ranks, num_slots)
    out = torch.empty(width, dtype=torch.int32, device=rows.device)
    _outcome_kernel[(1,)](
        plan.decision,
        rows,
        plan.expert_load,
        plan.slot_expert,
        plan.quota,
        speeds,
        out,
        plan.slot_expert.numel(),
        NUM_EXPERTS=num_experts,
        NUM_RANKS=num_ranks,
        NUM_SLOTS=max(1, num_slots),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out


def unpack_outcome(
    values: NDArray[np.int32], num_experts: int, num_ranks: int, num_slots: int
) -> Outcome:
    """What ``pack_outcome`` packed, copied out of ``values``."""
    parts = np.split(values[_HEAD:].copy(), [num_ranks, num_ranks + num_experts])
    speeds, loads, places = parts
    slot_expert, slot_load = places.reshape(2, num_ranks, num_slots)
    return Outcome(int(values[0]), int(values[1]), loads, slot_expert, slot_load, speeds)
