"""How an expert's bytes lie in a tensor of experts."""

import torch

__all__ = ["expert_bytes"]


def expert_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` (N, ...) as (N, B) uint8: each expert from its first byte in memory to its last.

    In whatever order its elements lie. Nothing is copied.
    """
    if not tensor.numel():
        return tensor.new_empty((tensor.shape[0], 0), dtype=torch.uint8)
    inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    extent = 1 + sum((length - 1) * stride for length, stride in inner)
    flat = tensor.detach().as_strided((tensor.shape[0], extent), (tensor.stride(0), 1))
    return flat.view(torch.uint8)
