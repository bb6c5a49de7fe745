"""checksum: tensors (N, ...) of experts -> one int64 for each expert that is wanted.

Every word times an odd number of its place, added up modulo 2**64: one flipped bit changes
the sum, and so do two words that changed places. Tensors follow one another by Horner's rule. Twin
of ``device.checksum``, with which it is bit for bit the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ultraep_kernels.experts import TENSOR_FACTOR, expert_words
from ultraep_kernels.host._compile import compiled


@compiled
def _checksum_kernel(words: Any) -> int:
    total = np.uint64(0)
    for place in range(words.size):
        total += np.uint64(words[place]) * np.uint64(2 * place + 1)
    return int(np.int64(total))


def checksums(tensors: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Checksums (N,) int64 of the experts on CPU that ``tensors`` (N, ...) make up.

    ``wanted`` (N,); 0 where an expert has none.
    """
    total = torch.zeros(wanted.shape, dtype=torch.int64)
    for tensor in tensors:
        words, sums = expert_words(tensor), torch.zeros_like(total)
        unsigned = words.numpy().view(np.uint32 if words.dtype is torch.int32 else np.uint8)
        for expert in wanted.nonzero().view(-1).tolist():
            sums[expert] = _checksum_kernel(unsigned[expert])
        total = total * TENSOR_FACTOR + sums
    return total
