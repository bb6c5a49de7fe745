"""Stands in for SGLang's kernel package, whose CPU build is not published.

Registers no operators, so that SGLang takes its plain torch paths. Modules that SGLang imports for
features such as speculative decoding find their ``*_cpu`` functions here, but may not call them.
Verified with SGLang 0.5.23.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__all__ = ["assign_req_to_token_pool_cpu"]


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write where each request's new tokens are cached, in place.

    Request n is row ``req_pool_indices[n]`` of ``req_to_token`` (requests, ``pool_len``); its
    places ``start_offset[n]`` to ``end_offset[n]`` take the next entries of ``out_cache_loc``.
    """
    assert req_to_token.shape[1] == pool_len
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    taken = 0
    for request, start, end in rows:
        req_to_token[request, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{name} needs SGLang's CPU kernels, which are not installed")

    return missing
