"""Experts on CPU, one after another, as products of matrices; knows no engine.

torch multiplies 16-bit matrices by oneDNN, which uses the CPU's own instructions where it has them.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["Expert", "Rows", "float32_product", "rows_by_expert", "write_by_expert"]

Expert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # rows (N, H) to outputs (N, H)

_MOST_ROWS = 256  # that one product computes; with _ROUND_ROWS, few enough sizes to be kept
_ROUND_ROWS = 8


class Rows(NamedTuple):
    """What experts of a rank give for the assignments (T, K) of tokens, and room for it."""

    place: torch.Tensor  # (T, K) int32 into rows, -1 for another rank's
    rows: torch.Tensor  # (N, H), each weighted and rounded; in any order

    def added_up(self) -> torch.Tensor:
        """The rank's part (T, H) float32 of the tokens' outputs."""
        total = torch.empty((self.place.shape[0], self.rows.shape[1]), dtype=torch.float32)
        return self.add_to(total)

    def add_to(self, total: torch.Tensor) -> torch.Tensor:
        """``total`` (T, H), float32 or of the rows' type, after it was made their sums."""
        # Only now: engines load this module where they cannot bear numba's (``_group_of_model``).
        from ultraep_kernels.host.combine import combine

        return combine(self.place[None], self.rows[None], total)


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
    """Assignments (N,) int64 of those in ``local`` (T, K), by expert, and how many each has.

    An assignment with id -1 is computed elsewhere.
    """
    ids = local.reshape(-1).numpy().astype(np.int16)  # which numpy sorts by counting
    numbers = np.bincount(ids + 1, minlength=num_experts + 1)
    order = np.argsort(ids, kind="stable")[numbers[0] :]
    return torch.from_numpy(order), numbers[1:].tolist()


def write_by_expert(
    expert: Callable[[int], Expert],
    num_experts: int,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    outputs: Rows,
) -> None:
    """Write what the experts of this rank in ``local`` (T, K) give, -1 having none.

    ``x`` (T, H), ``topk_weights`` (T, K).

    Computed for a rounded number of rows: oneDNN compiles a matrix product anew for every number
    of rows it has not seen, which costs more than the product, and with exact loads every batch
    brings new ones.
    """
    assignments, numbers = rows_by_expert(local, num_experts)
    outputs.place.fill_(-1)
    outputs.place.view(-1)[assignments] = torch.arange(len(assignments), dtype=torch.int32)
    tokens = torch.div(assignments, local.shape[1], rounding_mode="floor")
    weights = topk_weights.reshape(-1)[assignments].float().unsqueeze(1)
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
            outputs.rows[part] = compute(gathered)[:size] * weights[part]  # in float32
