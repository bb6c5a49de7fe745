"""reroute: topk_ids (T, K) logical + share -> topk_ids (T, K) physical, padding kept.

The rule is that of the twin, ``host.reroute``: the j-th assignment of expert e takes place
``j * stride_e mod n_e``. Two launches: one writes per expert its stride and where its places lie,
the other looks every assignment up. Which assignment is the j-th is known from ``count``: those in
earlier blocks of ids, plus those further ahead in the same block.
"""

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.device.count import BLOCK_IDS, Counted
from ultraep_kernels.device.status import SHARE_TOO_SMALL

__all__ = ["reroute"]

_GOLDEN_NUMERATOR = tl.constexpr(GOLDEN_NUMERATOR)
_GOLDEN_DENOMINATOR = tl.constexpr(GOLDEN_DENOMINATOR)


@triton.jit
def _stride_of(places):
    """Smallest number from ``places`` times the golden ratio on that is coprime to ``places``."""
    stride = tl.maximum(places.to(tl.int64) * _GOLDEN_NUMERATOR // _GOLDEN_DENOMINATOR, 1)
    stride = stride.to(tl.int32)
    a = places
    b = stride
    while (b != 0) | (a != 1):  # b is 0 when a is the greatest common divisor
        found = b == 0
        stride = tl.where(found, stride + 1, stride)
        remainder = tl.where(found, stride, a % tl.maximum(b, 1))
        a = tl.where(found, places, b)
        b = remainder
    return stride


@triton.jit
def _places_kernel(
    share_ptr,  # (E, R) int32
    slot_expert_ptr,  # (R, S) int32
    ends_ptr,  # (E, R) int32, out: where each rank's places end
    physical_ptr,  # (E, R) int32, out: physical expert on each rank, -1 where there is none
    stride_ptr,  # (E,) int32, out
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    expert = tl.program_id(0)
    ranks = tl.arange(0, BLOCK_RANKS)
    exists = ranks < NUM_RANKS
    share = tl.load(share_ptr + expert * NUM_RANKS + ranks, mask=exists, other=0)
    share = tl.maximum(share, 0)
    tl.store(ends_ptr + expert * NUM_RANKS + ranks, tl.cumsum(share, axis=0), mask=exists)
    several = tl.sum((share > 0).to(tl.int32), axis=0) > 1
    tl.store(stride_ptr + expert, _stride_of(tl.where(several, tl.sum(share, axis=0), 1)))
    master = ranks * (NUM_MASTERS + NUM_SLOTS) + expert % NUM_MASTERS
    physical = tl.where(ranks == expert // NUM_MASTERS, master, -1)
    for slot in tl.static_range(NUM_SLOTS):
        held = tl.load(slot_expert_ptr + ranks * NUM_SLOTS + slot, mask=exists, other=-1)
        here = ranks * (NUM_MASTERS + NUM_SLOTS) + NUM_MASTERS + slot
        physical = tl.where(held == expert, here, physical)
    tl.store(physical_ptr + expert * NUM_RANKS + ranks, physical, mask=exists)


@triton.jit
def _assign_kernel(
    ids_ptr,  # (N,) int32 or int64
    before_ptr,  # (B, E + 1) int32
    ends_ptr,  # (E, R) int32
    physical_ptr,  # (E, R) int32
    stride_ptr,  # (E,) int32
    out_ptr,  # (N,) of the type of the ids
    status_ptr,  # (1,) int32
    num_ids,
    NUM_EXPERTS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # halvings from R ranks to one
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    offsets = block * BLOCK + within
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < NUM_EXPERTS)
    expert = tl.where(valid, ids, -1).to(tl.int32)
    earlier = (expert[:, None] == expert[None, :]) & (within[:, None] < within[None, :])
    row_ptr = before_ptr + block.to(tl.int64) * (NUM_EXPERTS + 1)
    index = tl.load(row_ptr + expert, mask=valid, other=0) + tl.sum(earlier.to(tl.int32), axis=0)
    row = expert * NUM_RANKS
    places = tl.load(ends_ptr + row + NUM_RANKS - 1, mask=valid, other=1)
    stride = tl.load(stride_ptr + expert, mask=valid, other=1)
    place = (index.to(tl.int64) * stride % tl.maximum(places, 1)).to(tl.int32)
    low = tl.zeros((BLOCK,), tl.int32)  # the first rank whose places end behind this one
    high = low + (NUM_RANKS - 1)
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        behind = tl.load(ends_ptr + row + middle, mask=valid, other=1) > place
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    physical = tl.load(physical_ptr + row + low, mask=valid, other=-1)
    short = valid & ((index >= places) | (physical < 0))
    width: tl.constexpr = NUM_MASTERS + NUM_SLOTS
    master = expert // NUM_MASTERS * width + expert % NUM_MASTERS
    tl.store(out_ptr + offsets, tl.where(short, master, physical), mask=offsets < num_ids)
    if tl.max(short.to(tl.int32), axis=0) > 0:
        tl.atomic_or(status_ptr, SHARE_TOO_SMALL)


def reroute(
    topk_ids: torch.Tensor,
    share: torch.Tensor,
    slot_expert: torch.Tensor,
    num_masters: int,
    counted: Counted,
    status: torch.Tensor,
) -> torch.Tensor:
    """Physical ids (T, K) of the type of ``topk_ids``; twin ``host.reroute.reroute``.

    ``topk_ids`` (T, K) int32 or int64, what is no expert becomes -1; ``share`` (E, R) int32
    assignments of this source by target rank; ``slot_expert`` (R, S) int32; ``counted`` of the same
    ids. Where the share holds fewer assignments than the ids, the rest goes to its master, which is
    always right, and ``status`` (1,) says so (SHARE_TOO_SMALL).
    """
    num_experts, num_ranks = share.shape
    num_slots = slot_expert.shape[1]
    ids = topk_ids.reshape(-1)
    device = ids.device
    ends = torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device)
    physical = torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device)
    stride = torch.empty(num_experts, dtype=torch.int32, device=device)
    out = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=device)
    _places_kernel[(num_experts,)](
        share,
        slot_expert,
        ends,
        physical,
        stride,
        NUM_MASTERS=num_masters,
        NUM_SLOTS=num_slots,
        NUM_RANKS=num_ranks,
        BLOCK_RANKS=max(32, triton.next_power_of_2(num_ranks)),
        num_warps=1,
    )
    _assign_kernel[(counted.before.shape[0],)](
        ids,
        counted.before,
        ends,
        physical,
        stride,
        out,
        status,
        ids.numel(),
        NUM_EXPERTS=num_experts,
        NUM_MASTERS=num_masters,
        NUM_SLOTS=num_slots,
        NUM_RANKS=num_ranks,
        SEARCH_STEPS=(num_ranks - 1).bit_length(),
        BLOCK=BLOCK_IDS,
        num_warps=4,
    )
    return out
