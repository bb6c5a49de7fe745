"""combine: what experts gave for tokens -> their weighted sums, in one pass over the rows.

And ``add_parts``: such sums of several ranks -> the whole ones, rounded. Made for bfloat16, whose
rows would otherwise be converted, weighted, added and rounded one after another. They take one
thread, so they are for ranks that have few (``MOST_THREADS``).
"""

from typing import Any

import numpy as np
import torch

from ultraep_kernels.host._compile import compiled

__all__ = ["MOST_THREADS", "add_parts", "combine"]

MOST_THREADS = 4  # of a rank, up to which one thread here is faster than torch's operations
_ROUND, _KEPT = 0x7FFF, 0xFFFF0000  # of float32's bits, to bfloat16
_NO_WEIGHTS = np.empty(0, np.float32)


@compiled
def _rounded(value: Any) -> Any:
    """Bits of float32 ``value``, to the nearest that bfloat16 has, ties to even."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(_ROUND) + even) & np.uint32(_KEPT)
    return rounded if value == value else bits  # what is not a number stays so


@compiled
def _combine_kernel(
    total: Any, begun: int, tokens: Any, rows: Any, shift: Any, weights: Any
) -> int:
    for i in range(tokens.size):
        token = tokens[i]
        while begun <= token:
            for j in range(total.shape[1]):
                total[begun, j] = np.float32(0)
            begun += 1
        if weights.size == 0:
            for j in range(total.shape[1]):
                total[token, j] += np.uint32(np.uint32(rows[i, j]) << shift).view(np.float32)
        else:
            weight = weights[i]
            for j in range(total.shape[1]):
                value = np.uint32(np.uint32(rows[i, j]) << shift).view(np.float32) * weight
                total[token, j] += np.uint32(_rounded(value)).view(np.float32)
    return begun


def combine(
    total: torch.Tensor,
    begun: int,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
) -> int:
    """Add ``rows`` (n, H) times ``weights`` (n,), rounded to bfloat16, to ``total`` (T, H) float32.

    Row i is for token ``tokens[i]``; ``tokens`` (n,) int64. ``rows`` are bfloat16 or float32, and
    without weights bfloat16, added as they are. The first ``begun`` rows of ``total`` hold sums,
    the others nothing yet; returned is how many do afterwards. Where tokens rise, a row is thus
    cleared when it is in the cache anyway. All lie on CPU, contiguous. Raises TypeError for other
    types.
    """
    is_short = rows.dtype is torch.bfloat16
    if total.dtype is not torch.float32 or not (is_short or rows.dtype is torch.float32):
        raise TypeError(f"{rows.dtype} added to {total.dtype}; give bfloat16 or float32 to float32")
    if weights is None and not is_short:
        raise TypeError("rows without weights are bfloat16")
    bits = rows.view(torch.uint16 if is_short else torch.uint32).numpy()
    shift = np.uint32(16 if is_short else 0)
    factors = _NO_WEIGHTS if weights is None else weights.numpy()
    return int(_combine_kernel(total.numpy(), begun, tokens.numpy(), bits, shift, factors))


_BLOCK = 1024  # numbers that are added and rounded at once


@compiled
def _add_parts_kernel(parts: Any, first: int, total: Any, copy: Any) -> None:
    sums = np.empty(_BLOCK, np.float32)
    for start in range(0, total.size, _BLOCK):
        rounded, copied = total[start : start + _BLOCK], copy[start : start + _BLOCK]
        begin = first + start
        part = parts[0, begin : begin + rounded.size]
        for i in range(part.size):
            sums[i] = part[i]
        for rank in range(1, parts.shape[0]):
            part = parts[rank, begin : begin + rounded.size]
            for i in range(part.size):
                sums[i] += part[i]
        for i in range(rounded.size):
            rounded[i] = _rounded(sums[i]) >> np.uint32(16)
        for i in range(copied.size):
            copied[i] = rounded[i]


def add_parts(parts: torch.Tensor, first: int, total: torch.Tensor, copy: torch.Tensor) -> None:
    """Sums over ranks of ``parts`` (R, W) float32 into ``total`` and ``copy`` (n,) bfloat16.

    Of each rank n numbers are added, from number ``first`` on. All lie on CPU, contiguous. Raises
    TypeError for other types.
    """
    for tensor in (total, copy):
        if tensor.dtype is not torch.bfloat16:
            raise TypeError(f"float32 added to {tensor.dtype}; give bfloat16")
    bits = (tensor.view(torch.uint16).numpy() for tensor in (total, copy))
    _add_parts_kernel(parts.numpy(), first, *bits)
