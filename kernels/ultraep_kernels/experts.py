"""How an expert's bytes lie in a tensor of experts, and what their checksums are made with."""

import torch

TENSOR_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as int64; between checksums of tensors


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


def expert_words(tensor: torch.Tensor) -> torch.Tensor:
    """As ``expert_bytes``, (N, W) int32; uint8 where an expert's bytes are no whole words."""
    content = expert_bytes(tensor)
    places = content.shape[1], content.stride(0), content.storage_offset()
    return content if any(place % 4 for place in places) else content.view(torch.int32)
