"""identity: topk_ids (T, K) logical -> topk_ids (T, K) physical, every assignment to its master.

One launch, for batches that nothing is planned for. Twin: ``master_ids`` in
``ultraep_serve.balance.physical``.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ultraep_kernels.device.launch import Launches, launch
from ultraep_kernels.device.reroute import new_physical

__all__ = ["identity"]

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["num_ids"],
    do_not_specialize_on_alignment=["ids_ptr", "out_ptr"],  # an engine's; of any batch
)
def _identity_kernel(
    ids_ptr,  # (N,) int32 or int64
    out_ptr,  # (N,) of the same type
    num_ids,
    NUM_EXPERTS: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + offsets, mask=offsets < num_ids, other=-1)
    valid = (ids >= 0) & (ids < NUM_EXPERTS)
    expert = tl.where(valid, ids, 0).to(tl.int32)
    master = expert // NUM_MASTERS * (NUM_MASTERS + NUM_SLOTS) + expert % NUM_MASTERS
    tl.store(out_ptr + offsets, tl.where(valid, master, -1), mask=offsets < num_ids)


def identity(
    topk_ids: torch.Tensor,
    num_logical_experts: int,
    num_masters: int,
    num_slots: int,
    launches: Launches | None = None,
) -> torch.Tensor:
    """Physical ids (T, K) of the type of ``topk_ids`` (T, K) int32 or int64.

    What is no expert becomes -1. ``num_masters`` L and ``num_slots`` S of each rank. ``launches``
    of calls before with as many experts and ids of that type.
    """
    out = new_physical(topk_ids)
    number = topk_ids.numel()
    if number:
        changed: dict[str, Any] = {
            "ids_ptr": topk_ids.contiguous(),
            "out_ptr": out,
            "num_ids": number,
        }
        grid = (-(-number // _BLOCK),)
        (launches or Launches()).make(
            lambda: launch(
                _identity_kernel,
                grid,
                **changed,
                NUM_EXPERTS=num_logical_experts,
                NUM_MASTERS=num_masters,
                NUM_SLOTS=num_slots,
                BLOCK=_BLOCK,
                num_warps=4,
            ),
            *grid,
            changed,
        )
    return out
