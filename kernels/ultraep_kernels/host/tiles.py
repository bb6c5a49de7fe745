"""tiles: tokens, their experts and weights -> what experts give, on CPUs with AMX.

Gathering, both products of matrices, the activation between them and the weights behind are one
compiled pass. A part of an expert's tokens at a time stays in the cache meanwhile, and the vector
units work on the sums of one block while tiles compute the next. Sums run over the inputs in one
order, so a row does not depend on those beside it.

One thread computes, so this is for ranks that have few (``MOST_THREADS``). Here ``lines`` are those
of 64 bytes that a row has; rows, matrices and sums are addresses where they are numbers.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite.binding import llvm_version_info
from numba.core.registry import cpu_target

from ultraep_kernels.host import _amx
from ultraep_kernels.host._amx import (
    add_few_products,
    add_products,
    begin,
    copy_line,
    end,
    fetch_line,
    silu,
    start,
    store,
    weigh,
)
from ultraep_kernels.host._compile import compiled
from ultraep_kernels.host.combine import MOST_THREADS

__all__ = ["INPUTS", "can_compute", "compute_experts", "packed"]

INPUTS = 32  # numbers of bfloat16 in a line: inputs, inner size and outputs are multiples of it
_LINE, _TILE = 64, 1024  # bytes
_ROWS = _amx.ROWS
_BLOCK = 2 * _ROWS  # rows, or columns, whose sums are computed at once
_SUMS = _BLOCK * _BLOCK * 4  # bytes
_WIDTH = _BLOCK * 4  # bytes of a row of sums
_CACHED = 1 << 20  # bytes of rows and their inner values at once, or 32 rows, in a cache of two MB


def can_compute(w13: torch.Tensor, w2: torch.Tensor) -> bool:
    """Whether ``compute_experts`` takes experts of these types and sizes in this process.

    numba may have been told to compile for another CPU than this one (``NUMBA_CPU_FEATURES``), and
    the operating system may refuse AMX. What an LLVM before 20 makes of ``_amx`` was not tried.
    """
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return (
        {"+amx-bf16", "+avx512bf16"} <= set(features)
        and llvm_version_info >= (20,)
        and torch.get_num_threads() <= MOST_THREADS
        and w13.dtype is w2.dtype is torch.bfloat16
        and w2.shape[1] % INPUTS == w2.shape[2] % INPUTS == 0
        and w13.shape[1:] == (2 * w2.shape[2], w2.shape[1])
        and bool(torch.cpu._init_amx())
    )


def packed(matrices: torch.Tensor) -> torch.Tensor:
    """``matrices`` (..., outputs, inputs) of bfloat16 as ``compute_experts`` expects them.

    Of 16 outputs, each pair of inputs lies beside the next output's. That is how vLLM packs them
    for AMX, too.
    """
    *some, outputs, inputs = matrices.shape
    pairs = matrices.reshape(*some, outputs // _ROWS, _ROWS, inputs // 2, 2)
    return pairs.transpose(-3, -2).reshape(matrices.shape)


class _Scratch(NamedTuple):
    """Memory for an expert, in whole lines of the cache: others are loaded half as fast."""

    rows: Any  # (N, H) of a part of its tokens, in tiles
    inner: Any  # (N, I), as well
    sums: Any  # of a block, and of the one before
    settings: Any


@functools.lru_cache(maxsize=4)
def _scratch(hidden_size: int, inner_size: int) -> _Scratch:
    """Kept, because memory that is new in every layer costs more than what is done in it."""
    most = max(1, _CACHED // (2 * (hidden_size + inner_size) * _BLOCK)) * _BLOCK
    rows, inner = (
        torch.zeros(most, size, dtype=torch.uint16) for size in (hidden_size, inner_size)
    )
    sums = torch.zeros(2 * _SUMS, dtype=torch.uint8)
    return _Scratch(rows.numpy(), inner.numpy(), sums.numpy(), _amx.settings())


@compiled
def _sort_kernel(
    local: Any, topk_weights: Any, place: Any, begins: Any, tokens: Any, places: Any, weights: Any
) -> None:
    """Assignments by expert, with rows of their own in the order of tokens."""
    number = 0
    for token in range(local.shape[0]):
        for k in range(local.shape[1]):
            expert = local[token, k]
            if expert >= 0:
                begins[expert + 2] += 1
    for expert in range(2, begins.size):
        begins[expert] += begins[expert - 1]
    for token in range(local.shape[0]):
        for k in range(local.shape[1]):
            expert = local[token, k]
            place[token, k] = -1
            if expert >= 0:
                at = begins[expert + 1]
                begins[expert + 1] += 1
                tokens[at], places[at], weights[at] = token, number, topk_weights[token, k]
                place[token, k] = number
                number += 1


@compiled
def _address(array: Any) -> Any:
    """As numba's own, which is unsigned, and with numbers that have a sign becomes floating."""
    return np.int64(array.ctypes.data)


@compiled
def _gather(x: int, tokens: Any, lines: int, to: int) -> None:
    for row in range(tokens.size):
        line = x + np.int64(tokens[row]) * lines * _LINE
        target = to + (row // _ROWS) * lines * _TILE + row % _ROWS * _LINE
        for number in range(lines):
            copy_line(line + number * _LINE, target + number * _TILE)


@compiled
def _add_block(
    rows: int, num_rows: int, lines: int, number: int, columns: int, more_columns: int
) -> None:
    at = rows + number * _TILE
    more = number * _TILE
    if num_rows > _ROWS:
        add_products(at, at + lines * _TILE, columns + more, more_columns + more)
    else:
        add_few_products(at, columns + more, more_columns + more)


@compiled
def _activate(sums: int, begin_row: int, end_row: int, inner: int, inner_lines: int) -> None:
    for row in range(begin_row, end_row):
        tile = inner + (row // _ROWS) * inner_lines * _TILE
        silu(sums + row * _WIDTH, tile + row % _ROWS * _LINE)


@compiled
def _inner_values(
    rows: int, num_rows: int, lines: int, w13: int, w2: int, inner: int, inner_lines: int, sums: int
) -> None:
    """silu(rows @ gate) * (rows @ up): the sums of a block are activated during the next one's."""
    panel, blocks = lines * _TILE, -(-num_rows // _BLOCK)
    up = w13 + 2 * inner_lines * panel
    at_once, ahead = -(-_BLOCK // lines), -(-_ROWS // blocks)
    other, target, before = sums + _SUMS, inner, 0
    for number in range(2 * inner_lines):
        gate_columns, up_columns = w13 + number * panel, up + number * panel
        is_last = number == 2 * inner_lines - 1
        next_gate = w2 if is_last else gate_columns + panel
        next_up = w2 + inner_lines * _TILE if is_last else up_columns + panel
        for block in range(blocks):
            some = min(_BLOCK, num_rows - block * _BLOCK)
            start()
            done = 0
            for line in range(lines):
                _add_block(rows + 2 * block * panel, some, lines, line, gate_columns, up_columns)
                for _ in range(ahead):
                    fetch_line(next_gate)
                    fetch_line(next_up)
                    next_gate += _LINE
                    next_up += _LINE
                upto = min(before, done + at_once)
                _activate(other, done, upto, target, inner_lines)
                done = upto
            store(sums)
            sums, other, before = other, sums, some
            target = inner + 2 * block * inner_lines * _TILE
            target += number // 2 * _TILE + number % 2 * (_LINE // 2)
    _activate(other, 0, before, target, inner_lines)


@compiled
def _weigh(
    sums: int,
    begin_row: int,
    end_row: int,
    places: Any,
    weights: Any,
    first: int,
    outputs: int,
    size: int,
) -> None:
    for row in range(begin_row, end_row):
        at = first + row
        weigh(sums + row * _WIDTH, weights[at], outputs + np.int64(places[at]) * size)


@compiled
def _outputs(
    inner: int,
    inner_lines: int,
    w2: int,
    lines: int,
    places: Any,
    weights: Any,
    outputs: int,
    sums: int,
) -> None:
    """weights * (inner @ down), each in its row of ``outputs``."""
    panel, blocks = inner_lines * _TILE, -(-places.size // _BLOCK)
    at_once, ahead = -(-_BLOCK // inner_lines), -(-_ROWS // blocks)
    other, target, first, before = sums + _SUMS, outputs, 0, 0
    for number in range(lines):
        columns = w2 + 2 * number * panel
        fetched = columns + 2 * panel
        for block in range(blocks):
            some = min(_BLOCK, places.size - block * _BLOCK)
            start()
            done = 0
            for line in range(inner_lines):
                _add_block(
                    inner + 2 * block * panel, some, inner_lines, line, columns, columns + panel
                )
                for _ in range(ahead):
                    fetch_line(fetched)
                    fetch_line(fetched + panel)
                    fetched += _LINE
                upto = min(before, done + at_once)
                _weigh(other, done, upto, places, weights, first, target, lines * _LINE)
                done = upto
            store(sums)
            sums, other, before = other, sums, some
            target, first = outputs + number * _LINE, block * _BLOCK
    _weigh(other, 0, before, places, weights, first, target, lines * _LINE)


@compiled
def _experts_kernel(
    x: Any,
    begins: Any,
    tokens: Any,
    places: Any,
    weights: Any,
    w13: Any,
    w2: Any,
    outputs: Any,
    scratch: Any,
) -> None:
    lines, inner_lines = x.shape[1] // INPUTS, w2.shape[2] // INPUTS
    gathered, inner, sums = _address(scratch.rows), _address(scratch.inner), _address(scratch.sums)
    begin(_address(scratch.settings))
    for expert in range(w13.shape[0]):
        start_row, end_row = begins[expert], begins[expert + 1]
        if start_row == end_row:
            continue
        parts = -(-(end_row - start_row) // scratch.rows.shape[0])
        size = -(-(end_row - start_row) // (parts * _BLOCK)) * _BLOCK  # parts of much the same size
        gate_up, down = _address(w13[expert]), _address(w2[expert])
        for first in range(start_row, end_row, size):
            part = slice(first, min(first + size, end_row))
            some = tokens[part]
            _gather(_address(x), some, lines, gathered)
            _inner_values(gathered, some.size, lines, gate_up, down, inner, inner_lines, sums)
            to = _address(outputs)
            _outputs(inner, inner_lines, down, lines, places[part], weights[part], to, sums)
    end()


def compute_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor],
    place: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Write the n rows that this rank's experts give for tokens ``x`` (T, H) bfloat16.

    ``local`` (T, K) int32 or int64 are their experts here, -1 for another rank's; ``topk_weights``
    (T, K) float32. ``matrices`` are gates and ups (E, 2 * I, H) and downs (E, H, I) that
    ``can_compute`` takes, ``packed``. In ``place`` (T, K) int32 is then which of ``rows`` (N, H)
    bfloat16 an assignment has, in the order of tokens, -1 for none. A row is weight *
    down(silu(gate(x)) * up(x)); down's inputs and the row are rounded, and what is below 2**-126
    becomes 0. All are contiguous on CPU. Not for two threads at once. Raises TypeError for tokens
    or rows of another type or size.
    """
    w13, w2 = matrices
    for given in (x, rows):
        if given.dtype is not w13.dtype or given.shape[1] != w13.shape[2]:
            raise TypeError(
                f"experts take {w13.shape[2]} numbers of {w13.dtype}, "
                f"not {given.shape[1]} of {given.dtype}"
            )
    begins = np.zeros(w13.shape[0] + 2, np.int64)
    most = local.numel()
    tokens, places = np.empty(most, np.int32), np.empty(most, np.int32)
    weights = np.empty(most, np.float32)
    _sort_kernel(
        local.numpy(), topk_weights.numpy(), place.numpy(), begins, tokens, places, weights
    )
    _experts_kernel(
        _bits(x),
        begins,
        tokens,
        places,
        weights,
        _bits(w13),
        _bits(w2),
        _bits(rows),
        _scratch(x.shape[1], w2.shape[2]),
    )


def _bits(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint16).numpy()
