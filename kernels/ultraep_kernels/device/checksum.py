"""checksum: tensors (N, ...) of experts -> one int64 for each expert that is wanted.

As ``host.checksum``: words times odd numbers of their places, added up modulo 2**64, and tensors by
Horner's rule. Bytes are taken as they lie in memory, words of 32 bits where that allows. Only the
experts that are wanted, which the device alone knows, are read.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ultraep_kernels.experts import TENSOR_FACTOR, expert_words

_BLOCK = 4096  # words of a program


@triton.jit(do_not_specialize=["num_words", "stride"])
def _checksums_kernel(
    words_ptr,  # (N, W) int32 or uint8
    wanted_ptr,  # (N,) int32: 0 where an expert is not wanted
    sums_ptr,  # (N,) int64, zero at first
    num_words,
    stride,  # words from one expert to the next
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(num_words, BLOCK)
    expert = tl.program_id(0) // blocks
    if tl.load(wanted_ptr + expert) != 0:
        block = (tl.program_id(0) % blocks).to(tl.int64)
        places = block * BLOCK + tl.arange(0, BLOCK)
        address = words_ptr + expert.to(tl.int64) * stride + places
        words = tl.load(address, mask=places < num_words, other=0).to(tl.int64) & 0xFFFFFFFF
        tl.atomic_add(sums_ptr + expert, tl.sum(words * (2 * places + 1), axis=0))


def checksums(tensors: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Checksums (N,) int64 of the experts that ``tensors`` (N, ...) make up.

    ``wanted`` (N,) int32 on the device; 0 where an expert has none.
    """
    total = torch.zeros(wanted.shape, dtype=torch.int64, device=wanted.device)
    for tensor in tensors:
        words = expert_words(tensor)
        sums = torch.zeros_like(total)
        grid = (wanted.numel() * -(-words.shape[1] // _BLOCK),)
        sizes = words.shape[1], words.stride(0)
        _checksums_kernel[grid](words, wanted, sums, *sizes, BLOCK=_BLOCK)
        total = total * TENSOR_FACTOR + sums
    return total
