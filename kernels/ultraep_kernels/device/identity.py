"""identity: topk_ids (T, K) logical -> topk_ids (T, K) physical, every assignment to its master.

One launch, for batches that nothing is planned for. Twin: ``master_ids`` in
``ultraep_serve.balance.physical``.
"""

import torch
import triton
import triton.language as tl

from ultraep_kernels.device.launch import Changing, Launches, launch

__all__ = ["Identity"]

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


class Identity:
    """Of ids of one type, one call after the other, by a launch that is made again."""

    def __init__(self, num_logical_experts: int, num_masters: int, num_slots: int) -> None:
        """``num_masters`` L and ``num_slots`` S of each rank."""
        self._sizes = num_logical_experts, num_masters, num_slots, _BLOCK
        self._ids = Changing("ids_ptr", "num_ids", "out_ptr")
        self._launches = Launches(self._ids)
        self._out, self._blocks = torch.empty(0), 0  # of the call before

    def __call__(self, topk_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``out`` (T, K), contiguous: physical ids, of the type of ``topk_ids`` int32 or int64.

        What is no expert becomes -1.
        """
        ids = topk_ids.contiguous()
        if out is not self._out:
            self._out, self._blocks = out, -(-out.numel() // _BLOCK)
            self._ids.set(0, out.numel(), out.data_ptr())
        self._ids.set(ids.data_ptr())
        if self._blocks:
            self._launches.make(lambda: self._launch(ids, out), self._blocks)
        return out

    def _launch(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        given = ids, out, out.numel(), *self._sizes
        launch(_identity_kernel, (self._blocks,), *given, num_warps=4)
