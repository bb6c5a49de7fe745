"""Ids looked up by a launch of their own, to be checked and timed; servers plan in the same one."""

import math

import torch
import triton
import triton.language as tl
from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.device.count import BLOCK_IDS, Count
from ultraep_kernels.device.reroute import AssignSizes, Places, assign_block, new_physical


def places_of(share: torch.Tensor, slot_expert: torch.Tensor, num_masters: int) -> Places:
    """From the source's ``share`` (E, R) of assignments, ``slot_expert`` (R, S), and L."""
    (num_experts, num_ranks), num_slots = share.shape, slot_expert.shape[1]
    physical = torch.full((num_experts, num_ranks), -1, dtype=torch.int32)
    experts, first = torch.arange(num_experts), (num_masters + num_slots) * torch.arange(num_ranks)
    owners = experts // num_masters
    physical[experts, owners] = (first[owners] + experts % num_masters).int()
    for rank, held in enumerate(slot_expert.tolist()):
        for slot, expert in enumerate(held):
            if expert >= 0:
                physical[expert, rank] = int(first[rank]) + num_masters + slot
    share = share.cpu().clamp(min=0)
    several = (share > 0).sum(1) > 1
    strides = [_stride(int(each)) for each in share.sum(1).where(several, torch.tensor(1))]
    found = share.cumsum(1).int(), physical, torch.tensor(strides, dtype=torch.int32)
    return Places(*(each.to(slot_expert.device) for each in found))


def _stride(places: int) -> int:
    stride = max(1, places * GOLDEN_NUMERATOR // GOLDEN_DENOMINATOR)
    while math.gcd(stride, places) != 1:
        stride += 1
    return stride


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def _assign_kernel(
    places,
    status_ptr,
    ids_ptr,
    before_ptr,
    num_ids,
    out_ptr,
    SIZES: tl.constexpr,
):
    block = tl.program_id(0)
    is_planned = block >= 0
    ids = ids_ptr, before_ptr, num_ids, out_ptr
    assign_block(block, is_planned, ids, places, status_ptr, SIZES)


def reroute(
    topk_ids: torch.Tensor,
    places: Places,
    num_slots: int,
    counted: Count,
    status: torch.Tensor,
) -> torch.Tensor:
    """Physical ids (T, K) of the type of ``topk_ids``; twin ``host.reroute.reroute``.

    Args:
        topk_ids: (T, K) int32 or int64, what is no expert becomes -1.
        places: of the plan.
        num_slots: S of a rank.
        counted: of the same ids.
        status: (1,) int32. Where the places are fewer than the assignments, the rest goes to its
            master, which is always right, and the status says so (SHARE_TOO_SMALL).
    """
    num_experts, num_ranks = places.ends.shape
    out = new_physical(topk_ids)
    sizes = AssignSizes(
        num_ranks=num_ranks,
        num_masters=num_experts // num_ranks,
        num_slots=num_slots,
        search_steps=(num_ranks - 1).bit_length(),
        tile=BLOCK_IDS,
    )
    ids = topk_ids.contiguous(), counted.before, counted.num_ids, out
    _assign_kernel[(counted.blocks,)](places, status, *ids, SIZES=sizes, num_warps=4)
    return out
