"""Expert parallelism on CPU, which SGLang's own torch path does not survive.

SGLang marks assignments of other ranks with -1 and its plain torch experts then index with that.
"""

import torch
import torch.nn.functional as F

__all__ = ["compute_own"]


def compute_own(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """This rank's part of the output (T, H), to be summed over ranks by the engine.

    ``x`` (T, H) all tokens, ``topk_weights`` (T, K), ``local_ids`` (T, K) expert on this rank, -1
    for another rank's; ``w13`` (L + S, 2I, H) gate above up, ``w2`` (L + S, H, I).
    out[t] = sum over k of weight[t, k] * w2 @ (silu(gate @ x[t]) * (up @ x[t]))
    """
    num_local = w13.shape[0]
    flat = local_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows_by_expert = torch.bincount(flat + 1, minlength=num_local + 1).tolist()
    remote = rows_by_expert[0]
    tokens = torch.div(order, local_ids.shape[1], rounding_mode="floor")
    weights = topk_weights.reshape(-1)[order].float().unsqueeze(1)
    total = torch.zeros(x.shape, dtype=torch.float32)
    end = remote
    for expert, num_rows in enumerate(rows_by_expert[1:]):
        start, end = end, end + num_rows
        if num_rows:
            mine = tokens[start:end]
            gate, up = F.linear(x[mine], w13[expert]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, w2[expert])
            total.index_add_(0, mine, rows.float().mul_(weights[start:end]))
    return total.to(x.dtype)
