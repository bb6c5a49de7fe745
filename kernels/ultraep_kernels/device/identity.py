"""identity: topk_ids (T, K) logical -> topk_ids (T, K) physical, every assignment to its master.

One launch, for batches that nothing is planned for. Twin: ``master_ids`` in
``ultraep_serve.balance.physical``.
"""

import torch
import triton
import triton.language as tl

from ultraep_kernels.device.launch import Launch

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
    """Sends ids home, layer after layer."""

    def __init__(self, num_logical_experts: int, num_masters: int, num_slots: int) -> None:
        """``num_masters`` L and ``num_slots`` S of each rank."""
        sizes = {"NUM_EXPERTS": num_logical_experts, "NUM_MASTERS": num_masters}
        given = {**sizes, "NUM_SLOTS": num_slots, "BLOCK": _BLOCK}
        changing = "ids_ptr", "out_ptr", "num_ids"
        self._launch = Launch(_identity_kernel, changing, given, num_warps=4)

    def __call__(self, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
        """Write physical ids to ``out``, of the size and type of ``topk_ids`` int32 or int64.

        Both are contiguous. What is no expert becomes -1.
        """
        if number := topk_ids.numel():
            self._launch(-(-number // _BLOCK), topk_ids, out, number)
