"""unpack: a matrix (outputs, inputs) that lies in blocks of columns -> (inputs, outputs), plain.

A block has ``COLUMNS`` outputs, of which those of one input lie beside each other: so an engine
packs weights for its vector kernels. A compiled pass takes one thread and matrices of 16 bits, so
it is for ranks that have few (``MOST_THREADS``); torch's own operations give the same.
"""

from typing import Any

import torch

from ultraep_kernels.host._compile import compiled
from ultraep_kernels.host.combine import MOST_THREADS

__all__ = ["COLUMNS", "unpack"]

COLUMNS = 16
_PIECES = COLUMNS * 2 // 8  # of eight bytes: one number after another takes longer
_INPUTS = 32  # at once, of two blocks beside each other: lines of the cache are written whole


@compiled
def _unpack_kernel(packed: Any, plain: Any) -> None:
    blocks, inputs, _ = packed.shape
    for first in range(0, inputs, _INPUTS):
        for block in range(0, blocks, 2):
            for row in range(first, min(first + _INPUTS, inputs)):
                begin = block * _PIECES
                for piece in range(_PIECES):
                    plain[row, begin + piece] = packed[block, row, piece]
                if block + 1 < blocks:
                    for piece in range(_PIECES):
                        plain[row, begin + _PIECES + piece] = packed[block + 1, row, piece]


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The matrix (inputs, outputs) of ``packed`` (outputs, inputs), contiguous on CPU.

    Outputs are a multiple of ``COLUMNS``, and those of an input in a block some times eight bytes.
    """
    num_outputs, num_inputs = packed.shape
    blocks = packed.view(num_outputs // COLUMNS, num_inputs, COLUMNS).view(torch.int64)
    if blocks.shape[2] != _PIECES or torch.get_num_threads() > MOST_THREADS:
        return blocks.permute(1, 0, 2).reshape(num_inputs, -1).view(packed.dtype)
    plain = torch.empty((num_inputs, num_outputs), dtype=packed.dtype)
    _unpack_kernel(blocks.numpy(), plain.view(torch.int64).numpy())
    return plain
