"""reroute: topk_ids (T, K) logical + share -> topk_ids (T, K) physical, padding kept.

The rule is that of the twin, ``host.reroute``: the j-th assignment of expert e takes place
``j * stride_e mod n_e``. Per expert its stride and where its places lie are written first, by a
launch of its own or by the one that ends the plan (``store_places``); then one launch looks every
assignment up. Which assignment is the j-th is known from ``count``: those in earlier blocks of ids,
plus those further ahead in the same block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.device._decisions import PLANNED
from ultraep_kernels.device.count import BLOCK_IDS, Counted, blocks_of, ids_of
from ultraep_kernels.device.launch import launch
from ultraep_kernels.device.status import SHARE_TOO_SMALL

__all__ = [
    "AssignSizes",
    "Places",
    "assign_block",
    "changed_by",
    "new_physical",
    "new_places",
    "places_of",
    "reroute",
    "store_places",
]

_GOLDEN_NUMERATOR = tl.constexpr(GOLDEN_NUMERATOR)
_GOLDEN_DENOMINATOR = tl.constexpr(GOLDEN_DENOMINATOR)
_BLOCK_EXPERTS = 4  # per program that writes places


class Places(NamedTuple):
    """Where each expert's assignments go."""

    ends: torch.Tensor  # (E, R) int32: where each rank's places end
    physical: torch.Tensor  # (E, R) int32: physical expert on each rank, -1 where there is none
    stride: torch.Tensor  # (E,) int32


class AssignSizes(NamedTuple):
    """What ``assign_block`` is compiled for."""

    num_ranks: int
    num_masters: int
    num_slots: int  # of a rank
    search_steps: int  # halvings from R ranks to one
    tile: int  # ids that all others of the block are compared with at a time
    block: int = BLOCK_IDS


@triton.jit
def _strides_of(places):
    """Smallest numbers from ``places`` times the golden ratio on that are coprime to ``places``."""
    stride = tl.maximum(places.to(tl.int64) * _GOLDEN_NUMERATOR // _GOLDEN_DENOMINATOR, 1)
    stride = stride.to(tl.int32)
    a = places
    b = stride
    goes_on = (b != 0) | (a != 1)  # b is 0 when a is the greatest common divisor
    while tl.max(goes_on.to(tl.int32), axis=0) > 0:
        found = b == 0
        stride = tl.where(found & goes_on, stride + 1, stride)
        remainder = tl.where(found, stride, a % tl.maximum(b, 1))
        next_a = tl.where(found, places, b)
        a = tl.where(goes_on, next_a, a)
        b = tl.where(goes_on, remainder, b)
        goes_on = (b != 0) | (a != 1)
    return stride


@triton.jit
def store_places(
    experts,  # (X,) int32
    share,  # (X, R) int32
    physical,  # (X, R) int32
    places,  # written
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Write ``Places`` of a few experts."""
    ranks = tl.arange(0, BLOCK_RANKS)
    share = tl.maximum(share, 0)
    offsets = experts[:, None] * NUM_RANKS + ranks[None, :]
    mask = (experts < NUM_EXPERTS)[:, None] & (ranks < NUM_RANKS)[None, :]
    tl.store(places.ends + offsets, tl.cumsum(share, axis=1), mask=mask)
    tl.store(places.physical + offsets, physical, mask=mask)
    several = tl.sum((share > 0).to(tl.int32), axis=1) > 1
    stride = _strides_of(tl.where(several, tl.sum(share, axis=1), 1))
    tl.store(places.stride + experts, stride, mask=experts < NUM_EXPERTS)


@triton.jit
def _places_kernel(
    share_ptr,  # (E, R) int32
    slot_expert_ptr,  # (R, S) int32
    places,  # written
    NUM_EXPERTS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    experts = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    ranks = tl.arange(0, BLOCK_RANKS)
    exists = ranks < NUM_RANKS
    offsets = experts[:, None] * NUM_RANKS + ranks[None, :]
    mask = (experts < NUM_EXPERTS)[:, None] & exists[None, :]
    share = tl.load(share_ptr + offsets, mask=mask, other=0)
    master = ranks[None, :] * (NUM_MASTERS + NUM_SLOTS) + (experts % NUM_MASTERS)[:, None]
    physical = tl.where(ranks[None, :] == (experts // NUM_MASTERS)[:, None], master, -1)
    for slot in tl.static_range(NUM_SLOTS):
        held = tl.load(slot_expert_ptr + ranks * NUM_SLOTS + slot, mask=exists, other=-1)
        here = ranks * (NUM_MASTERS + NUM_SLOTS) + NUM_MASTERS + slot
        physical = tl.where(held[None, :] == experts[:, None], here[None, :], physical)
    store_places(experts, share, physical, places, NUM_EXPERTS, NUM_RANKS, BLOCK_RANKS)


@triton.jit
def assign_block(
    block,
    is_planned,  # else every assignment goes to its master
    ids_ptr,  # (N,) int32 or int64
    before_ptr,  # (B, E + 1) int32
    num_ids,
    out_ptr,  # (N,) of the type of the ids
    places,
    status_ptr,  # (1,) int32
    SIZES: tl.constexpr,
):
    """Look up the assignments of one block of ids."""
    BLOCK: tl.constexpr = SIZES.block
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_MASTERS: tl.constexpr = SIZES.num_masters
    NUM_EXPERTS: tl.constexpr = NUM_RANKS * NUM_MASTERS
    within = tl.arange(0, BLOCK)
    offsets = block * BLOCK + within
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < NUM_EXPERTS)
    expert = tl.where(valid, ids, -1).to(tl.int32)
    width: tl.constexpr = NUM_MASTERS + SIZES.num_slots
    master = expert // NUM_MASTERS * width + expert % NUM_MASTERS
    target = tl.where(valid, master, -1)
    if is_planned:
        row_ptr = before_ptr + block.to(tl.int64) * (NUM_EXPERTS + 1)
        index = tl.load(row_ptr + expert, mask=valid, other=0)
        for first in range(0, BLOCK, SIZES.tile):
            others = first + tl.arange(0, SIZES.tile)
            place = block * BLOCK + others
            other = tl.load(ids_ptr + place, mask=place < num_ids, other=-1)
            earlier = (other[:, None] == ids[None, :]) & (others[:, None] < within[None, :])
            index += tl.sum(earlier.to(tl.int32), axis=0)
        row = expert * NUM_RANKS
        total = tl.load(places.ends + row + NUM_RANKS - 1, mask=valid, other=1)
        stride = tl.load(places.stride + expert, mask=valid, other=1)
        # compiled to a division of 32 bits for where both fit
        place = (index.to(tl.int64) * stride % tl.maximum(total, 1)).to(tl.int32)
        low = tl.full((BLOCK,), 0, tl.int32)  # the first rank whose places end behind this one
        high = low + (NUM_RANKS - 1)
        STEPS: tl.constexpr = SIZES.search_steps
        for _ in tl.static_range(STEPS):
            middle = (low + high) // 2
            behind = tl.load(places.ends + row + middle, mask=valid, other=1) > place
            high = tl.where(behind, middle, high)
            low = tl.where(behind, low, tl.minimum(middle + 1, high))
        physical = tl.load(places.physical + row + low, mask=valid, other=-1)
        short = valid & ((index >= total) | (physical < 0))
        target = tl.where(short, master, physical)
        if tl.max(short.to(tl.int32), axis=0) > 0:
            tl.atomic_or(status_ptr, SHARE_TOO_SMALL)
    tl.store(out_ptr + offsets, target, mask=offsets < num_ids)


@triton.jit(do_not_specialize=["num_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def _assign_kernel(
    places,
    status_ptr,
    decision_ptr,  # (1,) int32; None: it is planned
    ids_ptr,
    before_ptr,
    num_ids,
    out_ptr,
    SIZES: tl.constexpr,
):
    block = tl.program_id(0)
    is_planned = block >= 0
    if decision_ptr is not None:
        is_planned = tl.load(decision_ptr) == PLANNED
    assign_block(
        block, is_planned, ids_ptr, before_ptr, num_ids, out_ptr, places, status_ptr, SIZES
    )


def new_places(num_experts: int, num_ranks: int, device: torch.device | str) -> Places:
    """To be written by ``store_places``."""
    return Places(
        ends=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        physical=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        stride=torch.empty(num_experts, dtype=torch.int32, device=device),
    )


def places_of(share: torch.Tensor, slot_expert: torch.Tensor, num_masters: int) -> Places:
    """From ``share`` (E, R) int32 assignments of this source by target rank, ``slot_expert``
    (R, S) int32 and L."""
    num_experts, num_ranks = share.shape
    places = new_places(num_experts, num_ranks, share.device)
    launch(
        _places_kernel,
        (triton.cdiv(num_experts, _BLOCK_EXPERTS),),
        share,
        slot_expert,
        places,
        NUM_EXPERTS=num_experts,
        NUM_MASTERS=num_masters,
        NUM_SLOTS=slot_expert.shape[1],
        NUM_RANKS=num_ranks,
        BLOCK_EXPERTS=_BLOCK_EXPERTS,
        BLOCK_RANKS=max(32, triton.next_power_of_2(num_ranks)),
        num_warps=4,
    )
    return places


def new_physical(topk_ids: torch.Tensor) -> torch.Tensor:
    """Room for the physical ids of ``topk_ids``, row by row whatever these are."""
    return torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device=topk_ids.device)


def changed_by(topk_ids: torch.Tensor, counted: Counted, out: torch.Tensor) -> dict[str, Any]:
    """What ``Launches`` of a reroute take anew for other ids."""
    grid = (blocks_of(topk_ids.numel()),)
    return {"grid": grid, "out_ptr": out, **ids_of(topk_ids, counted)}


def reroute(
    topk_ids: torch.Tensor,
    places: Places,
    num_slots: int,
    counted: Counted,
    status: torch.Tensor,
    *,
    decision: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Physical ids (T, K) of the type of ``topk_ids``; twin ``host.reroute.reroute``.

    Args:
        topk_ids: (T, K) int32 or int64, what is no expert becomes -1.
        places: of the plan.
        num_slots: S of a rank.
        counted: of the same ids.
        status: (1,) int32. Where the places are fewer than the assignments, the rest goes to its
            master, which is always right, and the status says so (SHARE_TOO_SMALL).
        decision: (1,) int32; unless it is PLANNED every assignment goes to its master.
        out: to write to and to return, from ``new_physical``.
    """
    num_experts, num_ranks = places.ends.shape
    out = new_physical(topk_ids) if out is None else out
    changed = changed_by(topk_ids, counted, out)
    sizes = AssignSizes(
        num_ranks=num_ranks,
        num_masters=num_experts // num_ranks,
        num_slots=num_slots,
        search_steps=(num_ranks - 1).bit_length(),
        tile=BLOCK_IDS,
    )
    grid = changed.pop("grid")
    launch(_assign_kernel, grid, places, status, decision, **changed, SIZES=sizes, num_warps=4)
    return out
