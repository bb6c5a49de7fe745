"""reroute: topk_ids (T, K) logical + share -> topk_ids (T, K) physical, padding kept.

The rule is that of the twin, ``host.reroute``: the j-th assignment of expert e takes place
``j * stride_e mod n_e``. Per expert its stride and where its places lie are written where the plan
ends (``store_places``); then every assignment is looked up (``assign_block``), in the same launch.
Which assignment is the j-th is known from ``count``: those in earlier blocks of ids, plus those
further ahead in the same block.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.device.count import BLOCK_IDS
from ultraep_kernels.device.status import SHARE_TOO_SMALL

_GOLDEN_NUMERATOR = tl.constexpr(GOLDEN_NUMERATOR)
_GOLDEN_DENOMINATOR = tl.constexpr(GOLDEN_DENOMINATOR)
_HALVINGS = tl.constexpr(8)  # between two looks whether that was enough
_NO_STRIDE = tl.constexpr((1 << 31) - 1)


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
def every_32nd(SIZE: tl.constexpr):
    """0 to SIZE - 1, of which each lane of a warp has every 32nd number.

    So lanes have the same ranks in all that a plan is made of. Where numbers are stored in a row
    Triton would have a lane take several that follow each other, there and wherever these go.
    """
    return tl.max_contiguous(tl.arange(0, SIZE), 1)


@triton.jit
def _stride_of(places):
    """The smallest number from ``places`` times the golden ratio on that is coprime to ``places``.

    A warp tries 32 at once, by halving and subtracting, which are faster than division.
    """
    first = tl.maximum(places.to(tl.int64) * _GOLDEN_NUMERATOR // _GOLDEN_DENOMINATOR, 1)
    tried = first.to(tl.int32) + tl.arange(0, 32)
    stride = places * 0 + _NO_STRIDE
    while stride == _NO_STRIDE:
        is_odd = tried & 1 == 1
        odd = tl.where(is_odd, tried, places | 1)  # of two even numbers none is coprime
        rest = tl.where(is_odd, places, tl.where(places & 1 == 1, tried, 0))
        while tl.max(rest, axis=0) > 0:
            for _ in tl.static_range(_HALVINGS):
                is_even = rest & 1 == 0
                less = tl.minimum(odd, rest)
                rest = tl.where(is_even, rest, tl.abs(odd - rest)) >> 1
                odd = tl.where(is_even, odd, less)
        stride = tl.min(tl.where(odd == 1, tried, _NO_STRIDE), axis=0)
        tried += 32
    return stride


@triton.jit
def store_places(
    expert,
    share,  # (R,) int32
    physical,  # (R,) int32
    places,  # written
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Write ``Places`` of an expert."""
    ranks = every_32nd(BLOCK_RANKS)
    share = tl.maximum(share, 0)
    offsets = expert * NUM_RANKS + ranks
    tl.store(places.ends + offsets, tl.cumsum(share, axis=0), mask=ranks < NUM_RANKS)
    tl.store(places.physical + offsets, physical, mask=ranks < NUM_RANKS)
    several = tl.sum((share > 0).to(tl.int32), axis=0) > 1
    stride = _stride_of(tl.where(several, tl.sum(share, axis=0), 1))
    tl.store(places.stride + expert, stride)


@triton.jit
def assign_block(
    block,
    is_planned,  # else every assignment goes to its master
    ids,  # (N,) int32 or int64; (B, E + 1) int32 of the count; N; (N,) of their type, out
    places,
    status_ptr,  # (1,) int32
    SIZES: tl.constexpr,
):
    """Look up the assignments of one block of ids."""
    ids_ptr, before_ptr, num_ids, out_ptr = ids
    BLOCK: tl.constexpr = SIZES.block
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    NUM_MASTERS: tl.constexpr = SIZES.num_masters
    NUM_EXPERTS: tl.constexpr = NUM_RANKS * NUM_MASTERS
    within = tl.arange(0, BLOCK)
    offsets = block * BLOCK + within
    own = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (own >= 0) & (own < NUM_EXPERTS)
    expert = tl.where(valid, own, -1).to(tl.int32)
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
            earlier = (other[:, None] == own[None, :]) & (others[:, None] < within[None, :])
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


def new_places(num_experts: int, num_ranks: int, device: torch.device | str) -> Places:
    """To be written by ``store_places``."""
    return Places(
        ends=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        physical=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        stride=torch.empty(num_experts, dtype=torch.int32, device=device),
    )


def new_physical(topk_ids: torch.Tensor) -> torch.Tensor:
    """Room for the physical ids of ``topk_ids``, row by row whatever these are."""
    return torch.empty_like(topk_ids, memory_format=torch.contiguous_format)
