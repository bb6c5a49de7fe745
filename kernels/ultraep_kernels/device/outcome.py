"""outcome: what the host records of a layer, packed so that one small copy takes it there.

Written by the launch that ends the plan.
"""

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from ultraep_kernels.contract import POLICY, Outcome

_HEAD = 3  # decision, policy, and experts sent
_HEAD_WIDTH, _POLICY = tl.constexpr(_HEAD), tl.constexpr(POLICY)
SENT = tl.constexpr(2)  # where the experts sent are; the plan's end stores them later


@triton.jit
def store_outcome(
    decision,
    known,  # Given, Attempts and DevicePlan
    own_ptr,  # (E,) integers, assignments of the rank whose tokens were planned
    slots,  # three (BLOCK,) int32: experts that each slot computes, how much, what is copied there
    out_ptr,  # (3 + R + 2 * E + 3 * R * S,) int32
    SIZES: tl.constexpr,  # PlanSizes
    BLOCK: tl.constexpr,
):
    """All but ``SENT``, by one program; ``slots`` lie rank by rank."""
    given, attempts, found = known
    held, amount, copied = slots
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr, decision)
    tl.store(out_ptr + 1, tl.load(given.rows.table + _POLICY))
    for start in range(0, NUM_RANKS, BLOCK):
        ranks = start + index
        speeds = tl.load(attempts.ranks + ranks * 2 + 1, mask=ranks < NUM_RANKS, other=0)
        tl.store(out_ptr + _HEAD_WIDTH + ranks, speeds, mask=ranks < NUM_RANKS)
    loads_ptr = out_ptr + _HEAD_WIDTH + NUM_RANKS
    for start in range(0, SIZES.num_experts, BLOCK):
        experts = start + index
        is_expert = experts < SIZES.num_experts
        load = tl.load(found.expert_load + experts, mask=is_expert, other=0)
        tl.store(loads_ptr + experts, load, mask=is_expert)
        own = tl.load(own_ptr + experts, mask=is_expert, other=0).to(tl.int32)
        tl.store(loads_ptr + SIZES.num_experts + experts, own, mask=is_expert)
    places_ptr = loads_ptr + 2 * SIZES.num_experts
    count: tl.constexpr = NUM_RANKS * SIZES.all_slots
    tl.store(places_ptr + index, held, mask=index < count)
    tl.store(places_ptr + count + index, amount, mask=index < count)
    tl.store(places_ptr + 2 * count + index, copied, mask=index < count)


def outcome_width(num_experts: int, num_ranks: int, num_slots: int) -> int:
    """int32 in a packed outcome."""
    return _HEAD + num_ranks + 2 * num_experts + 3 * num_ranks * num_slots


def unpack_outcome(
    values: NDArray[np.int32], num_experts: int, num_ranks: int, num_slots: int
) -> Outcome:
    """What ``store_outcome`` packed of N layers, (N, W), in the memory of ``values``."""
    loads = _HEAD + num_ranks
    own, places = loads + num_experts, loads + 2 * num_experts
    slots = values[:, places:].reshape(len(values), 3, num_ranks, num_slots)
    return Outcome(
        decision=values[:, 0],
        policy=values[:, 1],
        sent=values[:, SENT.value],
        expert_load=values[:, loads:own],
        own_load=values[:, own:places],
        slot_expert=slots[:, 0],
        is_copied=slots[:, 2] >= 0,
        slot_load=slots[:, 1],
        speed=values[:, _HEAD:loads],
    )
