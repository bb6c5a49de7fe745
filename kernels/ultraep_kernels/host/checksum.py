"""checksum: an expert's bytes in each of its tensors -> one int64, which other bytes do not have.

Every 32-bit word times an odd number of its place, added up modulo 2**64: one flipped bit changes
the sum, and so do two words that changed places. Tensors follow one another by Horner's rule.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_kernels.host._compile import compiled

__all__ = ["TENSOR_FACTOR", "checksum", "weighted_sum"]

TENSOR_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64
_WHOLE = 1 << 64


@compiled
def _checksum_kernel(words: Any) -> int:
    total = np.uint64(0)
    for place in range(words.size):
        total += np.uint64(words[place]) * np.uint64(np.uint32(2 * place + 1))
    return int(np.int64(total))


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Checksum, int64, of the ``tensors`` on CPU that make up one expert, of whatever types."""
    total = 0
    for tensor in tensors:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        total = total * TENSOR_FACTOR + _checksum_kernel(_words(content))
    return _wrapped(total)


def weighted_sum(values: NDArray[np.integer]) -> int:
    """Sum, int64 modulo 2**64, of ``values`` times odd numbers of their places."""
    flat = values.reshape(-1).astype(np.int64)
    with np.errstate(over="ignore"):
        return int((flat * (2 * np.arange(flat.size, dtype=np.int64) + 1)).sum())


def _words(content: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The bytes as whole, aligned words, filled up with zeros; copied only where need be."""
    if content.size % 4 or content.ctypes.data % 4:
        padded = np.zeros(-(-content.size // 4) * 4, np.uint8)
        padded[: content.size] = content
        content = padded
    return content.view(np.uint32)


def _wrapped(value: int) -> int:
    value %= _WHOLE
    return value - _WHOLE if value >= _WHOLE // 2 else value
