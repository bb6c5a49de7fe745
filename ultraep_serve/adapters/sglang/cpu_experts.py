"""Expert parallelism on CPU, which SGLang's own torch path does not survive.

SGLang marks assignments of other ranks with -1 and its plain torch experts then index with that.

In 16-bit models sums are taken in float32 until they are complete, across ranks too. Weighted
outputs in bfloat16 have 8 significant bits, so their float32 sum is exact unless they differ in
size by more than 2**13: a token's result does not depend on which rank computed which expert.
"""

import torch
import torch.nn.functional as F
from sglang.srt.runtime_context import get_parallel

__all__ = ["compute_and_reduce"]


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
        if num_rows:
            mine = tokens[start:end]
            gate, up = F.linear(x[mine], w13[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, w2[expert]).float().mul_(weights[start:end])
            total.index_add_(0, mine, rows.to(x.dtype).float())
    return total
