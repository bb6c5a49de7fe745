"""Experts on CPU: rows of assignments, products of matrices and sums; knows no engine.

torch multiplies matrices by oneDNN, which uses the CPU's own instructions where it has them.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

# Rows (n, H), their weights (n,) float32 and experts (n,), to weighted outputs (n, H) of that type.
Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Expert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # rows (n, H) to outputs (n, H)

_MOST_BYTES = 1 << 30  # of all rows that are computed at once
_MOST_ROWS = 256  # that one product computes; with _ROUND_ROWS, few enough sizes to be kept
_ROUND_ROWS = 8


def add_up(
    compute: Compute,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    total: torch.Tensor,
    scratch: int = 0,
) -> torch.Tensor:
    """Sum what a rank's own experts give for tokens ``x`` (T, H), in ``total`` (T, H) float32.

    ``topk_weights`` (T, K); ``local`` (T, K) experts of this rank, -1 for another rank's. So many
    rows are computed at once that they, their outputs and the ``scratch`` bytes that ``compute``
    takes of each fill 1 GiB. A token's are added in the order of its experts: weighted outputs in
    bfloat16 have 8 significant bits, so that a sum is exact, also over ranks, unless they differ in
    size by more than 2**13.
    """
    total.zero_()
    most = max(1, _MOST_BYTES // (_bytes_per_row(x.shape[1], x.dtype) + scratch))
    tokens, k = (local >= 0).nonzero(as_tuple=True)
    for some, of_some in zip(torch.split(tokens, most), torch.split(k, most), strict=True):
        chosen = topk_weights[some, of_some].float(), local[some, of_some]
        rows = compute(x.index_select(0, some), *chosen)
        total.index_add_(0, some, rows.float())
    return total


def most_tokens(
    num_bytes: int, hidden_size: int, experts_per_token: int, dtype: torch.dtype
) -> int:
    """How many tokens, at most, a rank can compute within ``num_bytes`` beside its weights.

    Counted are ``add_up``, its input and the layer's output; what else an engine holds comes on
    top, and the scratch of its kernel.
    """
    per_token = _bytes_per_row(hidden_size, dtype)
    return max(
        num_bytes // (per_token * (1 + experts_per_token)), (num_bytes - _MOST_BYTES) // per_token
    )


def _bytes_per_row(hidden_size: int, dtype: torch.dtype) -> int:
    """Of a row, what comes of it in the same type, and a sum in float32."""
    return hidden_size * (2 * dtype.itemsize + 4)


def own_type(dtype: torch.dtype) -> torch.dtype:
    """In which type this CPU multiplies matrices of ``dtype``: float32 where that is emulated."""
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype if dtype is torch.bfloat16 and has_bfloat16 else torch.float32


def float32_product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``rows`` (N, K) times ``matrix`` (M, K) transposed, both float32, by oneDNN.

    torch's own product of float32 matrices is MKL's, which has no AVX512 on AMD's CPUs. One row
    gets company: oneDNN adds up a single one in another order.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return F.linear(rows, matrix)
    several = rows.expand(2, -1) if rows.shape[0] == 1 else rows
    linear = torch.ops.mkldnn._linear_pointwise
    product: torch.Tensor = linear(several, matrix, None, "none", [], "")
    return product[: rows.shape[0]]


def by_expert(
    expert: Callable[[int], Expert],
    num_experts: int,
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """See ``Compute``: what each of ``experts`` gives for its row, by ``expert`` of that number.

    Computed for a rounded number of rows: oneDNN compiles a matrix product anew for every number
    of rows it has not seen, which costs more than the product, and with exact loads every batch
    brings new ones.
    """
    outputs = torch.empty_like(rows)
    order, numbers = torch.argsort(experts), torch.bincount(experts, minlength=num_experts)
    for index, own in enumerate(torch.split(order, numbers.tolist())):
        compute = expert(index) if own.numel() else None
        for part in torch.split(own, _MOST_ROWS):
            size = part.shape[0]
            padded = F.pad(part, (0, -size % _ROUND_ROWS)) if size > _ROUND_ROWS else part
            if compute is not None:
                gathered = rows.index_select(0, padded)  # several times as fast as rows[padded]
                found = compute(gathered)[:size] * weights[part, None]  # in float32
                outputs.index_copy_(0, part, found.to(outputs.dtype))
    return outputs


def is_exact(compute: Compute, rows: torch.Tensor, experts: torch.Tensor) -> bool:
    """Whether ``compute`` gives a row the same, bit for bit, whatever other rows are beside it.

    Some of ``rows`` are computed apart, of every expert another share.
    """
    weights = torch.ones(experts.shape)
    together = compute(rows, weights, experts)
    generator = torch.Generator().manual_seed(1)
    share = (1 + experts) / (2 + experts.max())
    apart = torch.rand(experts.shape, generator=generator) < share
    return all(
        torch.equal(compute(rows[some], weights[some], experts[some]), together[some])
        for some in (apart, ~apart)
    )
