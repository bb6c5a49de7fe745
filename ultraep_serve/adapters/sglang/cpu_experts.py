"""Expert parallelism on CPU, which SGLang's own torch path does not survive.

SGLang marks assignments of other ranks with -1 and its plain torch experts then index with that.

In 16-bit models sums are taken in float32 until they are complete, across ranks too. Weighted
outputs in bfloat16 have 8 significant bits, so their float32 sum is exact unless they differ in
size by more than 2**13: a token's result does not depend on which rank computed which expert.
"""

import torch
import torch.nn.functional as F
from sglang.srt.runtime_context import get_parallel

__all__ = ["complete_device_module", "compute_and_reduce"]

_MOST_ROWS = 256  # that one product computes; with _ROUND_ROWS, few enough sizes to be kept
_ROUND_ROWS = 16


def compute_and_reduce(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """This rank's part of the output (T, H), to be summed over ranks by the engine.

    ``x`` (T, H) all tokens, ``topk_weights`` (T, K), ``local_ids`` (T, K) expert on this rank, -1
    for another rank's; ``w13`` (L + S, 2I, H) gate above up, ``w2`` (L + S, H, I). In 16-bit models
    the first rank's part is all of it and the others' are zero, so that the engine's sum does not
    round it again.
    """
    total = _compute_own(x, topk_weights, local_ids, w13, w2)
    if x.dtype is torch.float32:
        return total
    group = get_parallel().moe_ep_group
    everything: torch.Tensor = group.all_reduce(total)
    return (everything if group.rank_in_group == 0 else everything.zero_()).to(x.dtype)


def _compute_own(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """Sum (T, H) float32 over this rank's assignments of each token.

    out[t] = sum over k of weight[t, k] * w2 @ (silu(gate @ x[t]) * (up @ x[t]))
    """
    flat = local_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows_by_expert = torch.bincount(flat + 1, minlength=w13.shape[0] + 1).tolist()
    tokens = torch.div(order, local_ids.shape[1], rounding_mode="floor")
    weights = topk_weights.reshape(-1)[order].float().unsqueeze(1)
    total = torch.zeros(x.shape, dtype=torch.float32)
    end = rows_by_expert[0]  # those of other ranks come first
    for expert, num_rows in enumerate(rows_by_expert[1:]):
        start, end = end, end + num_rows
        for part in range(start, end, _MOST_ROWS):
            rows = slice(part, min(part + _MOST_ROWS, end))
            outputs = _apply_expert(x, tokens[rows], w13[expert], w2[expert])
            outputs = outputs.float().mul_(weights[rows]).to(x.dtype).float()
            total.index_add_(0, tokens[rows], outputs)
    return total


def _apply_expert(
    x: torch.Tensor, tokens: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Outputs (N, H) of one expert, w13 (2I, H) and w2 (H, I), for rows ``tokens`` (N,) of ``x``.

    Computed for a rounded number of rows: oneDNN compiles a matrix product anew for every number
    of rows it has not seen, which costs more than the product, and with exact loads every batch
    brings new ones.
    """
    num_rows = tokens.shape[0]
    if num_rows > _ROUND_ROWS:
        tokens = F.pad(tokens, (0, -num_rows % _ROUND_ROWS))
    gate, up = F.linear(x[tokens], w13).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)[:num_rows]


def complete_device_module() -> None:
    """Give ``torch.cpu`` the functions that SGLang's expert recorder calls, where it has none.

    Target: ``torch.get_device_module()`` in ``eplb.expert_distribution``. There are no graphs to
    capture and no cache to empty on CPU. Verified with SGLang 0.5.23 and torch 2.13. Remove when
    torch has them or SGLang asks first.
    """
    for name, function in (("is_current_stream_capturing", _false), ("empty_cache", _nothing)):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)


def _false() -> bool:
    return False


def _nothing() -> None:
    return None
