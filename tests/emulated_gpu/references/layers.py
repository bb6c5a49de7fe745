"""What both engines compute in a layer beside attention and experts, in plain torch."""

from collections.abc import Sequence

import torch

from tests.emulated_gpu.operators.host import in_stream

__all__ = [
    "fused_add_rms_norm",
    "in_blocks",
    "likeliest",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]


@in_stream
def rms_norm(
    result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """Over the last dimension."""
    wide = input.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    result.copy_(wide if weight is None else wide.to(input.dtype) * weight)


@in_stream
def fused_add_rms_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    """In place: ``residual`` becomes the sum, and ``input`` its norm."""
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


@in_stream
def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    """Of a gate, and what it gates beside it."""
    gate, up = input.chunk(2, dim=-1)
    result.copy_((torch.nn.functional.silu(gate.float()) * up.float()).to(result.dtype))


@in_stream
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """In place, of the first dimensions of each head: halves of them, or neighbours."""
    rotated = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.view(-1)].float()[:, None].chunk(2, dim=-1)
    for x in (query, key):
        if x is None:
            continue
        heads = x.unflatten(-1, (-1, head_size)) if x.shape[-1] != head_size else x
        part = heads.view(len(cos), -1, head_size)[..., :rotated]
        of_pair = -2 if is_neox else -1
        pairs = part.float().unflatten(-1, (2, -1) if is_neox else (-1, 2))
        one, other = pairs.unbind(of_pair)
        turned = one * cos - other * sin, other * cos + one * sin
        part.copy_(torch.stack(turned, of_pair).flatten(-2))


def likeliest(
    logits: torch.Tensor, top_k: int, renormalize: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts (T, K) of each token's ``logits``; of two alike the lower number."""
    scores = logits.float().softmax(-1)
    chosen = scores if bias is None else scores + bias
    order = chosen.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, order)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, order


def in_blocks(
    ids: torch.Tensor, experts: Sequence[int], size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in ``ids`` by expert, and the expert of each block of ``size`` of them.

    Behind an expert's places its last block is filled with a place that is not there.
    """
    ids = ids.reshape(-1).long().cpu()
    order, of_blocks = [torch.empty(0, dtype=torch.long)], list[int]()
    for expert in experts:
        own = torch.nonzero(ids == expert).view(-1)
        blocks = -(-len(own) // size)
        padding = 0, blocks * size - len(own)
        order.append(torch.nn.functional.pad(own, padding, value=ids.numel()))
        of_blocks += [expert] * blocks
    return torch.cat(order), torch.tensor(of_blocks, dtype=torch.long)
