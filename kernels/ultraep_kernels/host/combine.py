"""combine: the rows that experts gave for tokens -> their sums, where ranks share memory of all.

Before that ``own_experts`` finds what a rank has to compute, and ``own_rows`` numbers its rows.

Rows come weighted and rounded. A token's are added in float32 in the order of its experts, whoever
computed them. A compiled pass takes bfloat16 with one thread, so it is for ranks that have few
(``MOST_THREADS``); torch's own operations give the same bits.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from ultraep_kernels.host._compile import compiled

__all__ = ["MOST_THREADS", "combine", "own_experts", "own_rows"]

MOST_THREADS = 4  # of a rank, up to which one thread here is faster than torch's operations
_ROUND, _KEPT = 0x7FFF, 0xFFFF0000  # of float32's bits, to bfloat16
_AT_ONCE = 1 << 17  # numbers that torch adds, few enough to stay in the cache meanwhile


@compiled
def _own_experts_kernel(physical: Any, first: int, number: int, local: Any) -> None:
    for i in range(local.size):
        at = physical[i] - first
        local[i] = at if 0 <= at < number else -1


def own_experts(physical: torch.Tensor, first: int, number: int) -> torch.Tensor:
    """Local experts (T, K) int32 of ``physical`` (T, K), of which a rank has those from ``first``.

    The rank has so many as ``number`` says; another rank's, and padding, become -1.
    """
    local = torch.empty(physical.shape, dtype=torch.int32)
    _own_experts_kernel(physical.reshape(-1).numpy(), first, number, local.view(-1).numpy())
    return local


@compiled
def _own_rows_kernel(
    local: Any, topk_weights: Any, place: Any, tokens: Any, experts: Any, weights: Any
) -> int:
    number = 0
    for token in range(local.shape[0]):
        for k in range(local.shape[1]):
            # Without a branch, which nobody can predict: another rank's is overwritten.
            is_own = int(local[token, k] >= 0)
            place[token, k] = (number + 1) * is_own - 1
            tokens[number], experts[number] = token, local[token, k]
            weights[number] = topk_weights[token, k]
            number += is_own
    return number


def own_rows(
    local: torch.Tensor, topk_weights: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number this rank's assignments in the order of tokens: in ``place`` (T, K) int32.

    ``local`` (T, K) int32 or int64, -1 for another rank's, which have the place -1;
    ``topk_weights`` (T, K) float32. Returns of each of the n assignments its token (n,) int64, its
    expert (n,) int32 and its weight (n,) float32. All lie on CPU.
    """
    room = local.numel() + 1
    tokens = torch.empty(room, dtype=torch.int64)
    experts = torch.empty(room, dtype=torch.int32)
    weights = torch.empty(room, dtype=torch.float32)
    tensors = local, topk_weights, place, tokens, experts, weights
    number = _own_rows_kernel(*(tensor.numpy() for tensor in tensors))
    return tokens[:number], experts[:number], weights[:number]


class _Given(NamedTuple):
    """Places and rows of all ranks, each as one array: numba compiles once for all of their views.

    Strides are numbers from one rank's to the next one's.
    """

    place: Any  # int32
    place_stride: int
    rows: Any  # bits of bfloat16
    rows_stride: int
    num_ranks: int
    top_k: int

    @classmethod
    def of(cls, place: torch.Tensor, rows: torch.Tensor) -> "_Given":
        bits = _flat(rows).view(torch.uint16).numpy()
        strides = place.stride(0), rows.stride(0)
        return cls(_flat(place).numpy(), strides[0], bits, strides[1], len(rows), place.shape[2])


def _flat(of_ranks: torch.Tensor) -> torch.Tensor:
    """All that lies from the first to the last number of ``of_ranks`` (R, n, m)."""
    size = (len(of_ranks) - 1) * of_ranks.stride(0) + of_ranks[0].numel()
    return of_ranks.as_strided((size,), (1,))


@compiled
def _rounded(value: Any) -> Any:
    """Bits of float32 ``value``, to the nearest that bfloat16 has, ties to even."""
    bits = np.float32(value).view(np.uint32)
    even = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(bits + np.uint32(_ROUND) + even) & np.uint32(_KEPT)
    return rounded if value == value else bits  # what is not a number stays so


@compiled
def _widened(bits: Any) -> Any:
    """The float32 that bfloat16 ``bits`` are."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@compiled
def _add_rows(given: _Given, token: int, begins: Any, sums: Any) -> None:
    """``begins`` (K * R,) is room for where rows begin."""
    number, size = 0, sums.size
    for k in range(given.top_k):
        for rank in range(given.num_ranks):
            at = given.place[rank * given.place_stride + token * given.top_k + k]
            if at >= 0:
                begins[number] = rank * given.rows_stride + np.int64(at) * size
                number += 1
    for j in range(size):
        sums[j] = np.float32(0)
    for i in range(0, number - 1, 2):  # two at once: sums are read and written half as often
        first, second = given.rows[begins[i] :][:size], given.rows[begins[i + 1] :][:size]
        for j in range(size):
            sums[j] = (sums[j] + _widened(first[j])) + _widened(second[j])
    if number % 2:
        last = given.rows[begins[number - 1] :][:size]
        for j in range(size):
            sums[j] += _widened(last[j])


@compiled
def _sum_kernel(given: _Given, total: Any) -> None:
    begins = np.empty(given.num_ranks * given.top_k, np.int64)
    for token in range(total.shape[0]):
        _add_rows(given, token, begins, total[token])


@compiled
def _rounded_kernel(given: _Given, total: Any, copy: Any) -> None:
    begins = np.empty(given.num_ranks * given.top_k, np.int64)
    sums = np.empty(total.shape[1], np.float32)
    for token in range(total.shape[0]):
        _add_rows(given, token, begins, sums)
        rounded = total[token]
        for j in range(sums.size):
            rounded[j] = _rounded(sums[j]) >> np.uint32(16)
        if copy.shape[0] > 0:
            copied = copy[token]
            for j in range(sums.size):
                copied[j] = rounded[j]


def combine(
    place: torch.Tensor,
    rows: torch.Tensor,
    total: torch.Tensor,
    copy: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the rows of each token, in ``total`` (n, H), which is returned.

    ``rows`` (R, N, H) hold what each rank gave, ``place`` (R, n, K) int32 where in them those of
    the tokens are, -1 for none. ``total`` is float32, or of the rows' type and rounded once;
    ``copy`` (n, H) of its type gets the same. What there is of each rank, totals and copies are
    contiguous, and ranks lie a number of rows apart. All lie on CPU. Raises TypeError for other
    types.
    """
    if total.dtype not in (rows.dtype, torch.float32):
        raise TypeError(f"rows in {rows.dtype} are added to float32 or that, not {total.dtype}")
    is_compiled = rows.dtype is torch.bfloat16 and torch.get_num_threads() <= MOST_THREADS
    if is_compiled and total.dtype is torch.bfloat16:
        outputs = total, total[:0] if copy is None else copy
        bits = (output.view(torch.uint16).numpy() for output in outputs)
        _rounded_kernel(_Given.of(place, rows), *bits)
        return total
    if is_compiled:
        _sum_kernel(_Given.of(place, rows), total.numpy())
    else:
        _combine_by_torch(place, rows, total)
    if copy is not None:
        copy.copy_(total)
    return total


def _combine_by_torch(place: torch.Tensor, rows: torch.Tensor, total: torch.Tensor) -> None:
    hidden_size = rows.shape[2]
    sums = total.zero_()
    if total.dtype is not torch.float32:
        sums = torch.zeros(total.shape, dtype=torch.float32)
    tokens, k, ranks = (place.permute(1, 2, 0) >= 0).nonzero(as_tuple=True)  # in this order
    numbers = ranks * (rows.stride(0) // hidden_size) + place[ranks, tokens, k]
    of_all = _flat(rows).view(-1, hidden_size)
    at_once = max(1, _AT_ONCE // hidden_size)
    for begin in range(0, tokens.numel(), at_once):
        some = slice(begin, begin + at_once)
        sums.index_add_(0, tokens[some], of_all.index_select(0, numbers[some]).float())
    if sums is not total:
        total.copy_(sums)
