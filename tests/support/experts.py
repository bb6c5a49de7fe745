"""Weights of SwiGLU experts, batches for them, and what a layer of any engine must answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ultraep_serve.costs.model import CostModel

NUM_EXPERTS, TOP_K = 12, 2
# These experts are so small that copying them may take longer than computing them.
ALWAYS_PAYS = CostModel(1.0, bytes_per_expert=1, link_bytes_per_second=1e12).to_json()

Tensors = dict[str, torch.Tensor]  # (E, ...) by the name of an engine's parameter


@dataclass(frozen=True)
class Batch:
    """What the router of one rank gives."""

    x: torch.Tensor  # (T, H) bfloat16
    ids: torch.Tensor  # (T, K) logical, -1 padding
    weights: torch.Tensor  # (T, K)


def make_weights(seed: int, hidden: int, inner: int) -> Tensors:
    """Experts that differ, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(NUM_EXPERTS, hidden, inner, generator=generator) / inner**0.5
    return {"w13_weight": w13.bfloat16(), "w2_weight": w2.bfloat16()}


def make_batch(
    seed: int, num_tokens: int, hidden: int, ids_type: torch.dtype = torch.int32
) -> Batch:
    """Tokens of which three in four choose among the first rank's experts; the last is padding."""
    generator = torch.Generator().manual_seed(seed)
    favour = torch.ones(NUM_EXPERTS)
    favour[: NUM_EXPERTS // 3] = 6.0
    ids = torch.full((num_tokens, TOP_K), -1)
    if num_tokens:
        ids = torch.multinomial(favour.expand(num_tokens, -1), TOP_K, generator=generator)
    if num_tokens > 1:
        ids[-1] = -1
    return Batch(
        torch.randn(num_tokens, hidden, generator=generator).bfloat16(),
        ids.to(ids_type),
        torch.rand(num_tokens, TOP_K, generator=generator),
    )


def swiglu(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | float = 0.0,
    b2: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Output (N, H) float32 of one expert, w13 (2I, H) gate above up, w2 (H, I); biases alike."""
    gate, up = (x.float() @ w13.float().T + b13).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().T + b2


def sum_of_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    compute: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """Sum of the chosen experts' outputs (T, H) float32; ``compute`` gives rows of one expert.

    ``ids`` and ``weights`` (T, K); negative ids add nothing.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for e in ids[ids >= 0].unique().tolist():
        rows, k = torch.nonzero(ids == e, as_tuple=True)
        total.index_add_(0, rows, compute(x[rows], e) * weights[rows, k, None].float())
    return total


def expected_output(batch: Batch, tensors: Tensors) -> torch.Tensor:
    """What every expert at home would give, (T, H) float32; ``tensors`` may have biases."""
    w13, w2 = tensors["w13_weight"], tensors["w2_weight"]
    none = torch.zeros(len(w13), 1)
    b13, b2 = (tensors.get(name, none) for name in ("w13_bias", "w2_bias"))
    return sum_of_experts(
        batch.x, batch.ids, batch.weights, lambda x, e: swiglu(x, w13[e], w2[e], b13[e], b2[e])
    )


class Noting:
    """A balancer whose physical ids are the logical ones and ``more``; it notes what it is asked.

    With the number of a micro-batch, where an engine tells it.
    """

    def __init__(self, more: int = 0) -> None:
        self._more = more
        self.seen: list[Any] = []
        self.routed: list[torch.Tensor] = []

    def route(self, layer: int, ids: torch.Tensor, tokens: int, *number: int) -> torch.Tensor:
        self.seen.append(("route", layer, tokens, *number))
        self.routed.append(ids)
        return ids + self._more

    def receive(self, *number: int) -> None:
        self.seen.append(("receive", *number))

    def experts_done(self, *number: int) -> None:
        self.seen.append(("experts done", *number))

    def computed(self, *number: int) -> None:
        self.seen.append(("computed", *number))
