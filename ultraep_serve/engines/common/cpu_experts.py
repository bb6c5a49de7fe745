"""Experts on CPU, one after another, as products of matrices; knows no engine.

torch multiplies 16-bit matrices by oneDNN, which uses the CPU's own instructions where it has them.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["Expert", "Outputs", "add_up", "float32_product", "outputs_by_expert", "rows_by_expert"]

Expert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # rows (N, H) to outputs (N, H)

_MOST_ROWS = 256  # that one product computes; with _ROUND_ROWS, few enough sizes to be kept
_ROUND_ROWS = 16


class Outputs(NamedTuple):
    """What experts gave for some assignments."""

    tokens: torch.Tensor  # (n,) int64
    rows: torch.Tensor  # (n, H)
    weights: torch.Tensor | None  # (n,) float32; None where rows are weighted

    def part(self, chosen: slice) -> "Outputs":
        """Some of them."""
        weights = None if self.weights is None else self.weights[chosen]
        return Outputs(self.tokens[chosen], self.rows[chosen], weights)

    def weighted(self, dtype: torch.dtype) -> torch.Tensor:
        """Rows (n, H) times their weights, rounded to ``dtype``."""
        if self.weights is None:
            return self.rows.to(dtype)
        return (self.rows * self.weights.unsqueeze(1)).to(dtype)  # multiplied in float32


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


def rows_by_expert(local: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """Places (N,) int64 of assignments in ``local`` (T, K), by expert, and how many each has.

    An assignment with id -1 is computed elsewhere.
    """
    ids = local.reshape(-1).numpy().astype(np.int16)  # which numpy sorts by counting
    numbers = np.bincount(ids + 1, minlength=num_experts + 1)
    order = np.argsort(ids, kind="stable")[numbers[0] :]
    return torch.from_numpy(order), numbers[1:].tolist()


def outputs_by_expert(
    expert: Callable[[int], Expert],
    num_experts: int,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
) -> Iterator[Outputs]:
    """What the experts of this rank in ``local`` (T, K) give, -1 having none.

    ``x`` (T, H), ``topk_weights`` (T, K).

    Computed for a rounded number of rows: oneDNN compiles a matrix product anew for every number
    of rows it has not seen, which costs more than the product, and with exact loads every batch
    brings new ones.
    """
    places, numbers = rows_by_expert(local, num_experts)
    tokens = torch.div(places, local.shape[1], rounding_mode="floor")
    weights = topk_weights.reshape(-1)[places].float()
    end = 0
    for index, num_rows in enumerate(numbers):
        start, end = end, end + num_rows
        compute = expert(index) if num_rows else None
        for first in range(start, end, _MOST_ROWS):
            part = slice(first, min(first + _MOST_ROWS, end))
            of_part = tokens[part]
            size = of_part.shape[0]
            rows = F.pad(of_part, (0, -size % _ROUND_ROWS)) if size > _ROUND_ROWS else of_part
            assert compute is not None
            gathered = x.index_select(0, rows)  # several times as fast as x[rows]
            yield Outputs(of_part, compute(gathered)[:size], weights[part])


def add_up(
    outputs: Iterable[Outputs], total: torch.Tensor, rounded_to: torch.dtype
) -> torch.Tensor:
    """Sum of ``outputs``, each weighted and rounded before it is added, in ``total`` (T, H).

    ``total`` is float32 and may hold anything before.
    """
    # Only now: engines load this module where they cannot bear numba's (``_group_of_model``).
    from ultraep_kernels.host.combine import MOST_THREADS, combine

    if rounded_to is torch.bfloat16 and torch.get_num_threads() <= MOST_THREADS:
        begun = 0
        for tokens, rows, weights in outputs:
            begun = combine(total, begun, tokens, rows, weights)
        total[begun:].zero_()
        return total
    total.zero_()
    for some in outputs:
        # A few at a time, so that what is converted stays in the cache until it is added.
        for first in range(0, len(some.tokens), _MOST_ROWS):
            few = some.part(slice(first, first + _MOST_ROWS))
            total.index_add_(0, few.tokens, few.weighted(rounded_to).float())
    return total
