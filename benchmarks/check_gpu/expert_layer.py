"""A layer whose experts lie in an expert kernel's own order, L + S on each virtual rank.

Slots are filled by this project's own kernels, as bytes, and the expert kernel computes with
physical ids, as in serving. Dispatch is left out: each rank is given all tokens, computes those
assignments that are its own, and outputs of ranks are added.

Shape letters: R ranks, E logical experts, L masters and S slots per rank, P = R * (L + S), H
hidden, I inner, N tokens of all ranks, K experts per token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from tests.support.virtual_ranks import VirtualRanks, make_ranks
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES
from ultraep_serve.types import ExpertShape

BLOCK = 128  # of FP8's scales
_LARGEST_FP8 = 448.0
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """One layer."""

    shape: ExpertShape
    hidden: int
    inner: int
    tokens: int  # of one rank
    top_k: int

    @property
    def num_physical(self) -> int:
        """P."""
        return self.shape.num_ranks * self.shape.num_local


@dataclass(frozen=True)
class Masters:
    """One rank's, as a checkpoint has them: gate before up, scales that multiply."""

    gate_up: torch.Tensor  # (L, 2 * I, H) bfloat16 or float8_e4m3fn
    down: torch.Tensor  # (L, H, I)
    gate_up_scale: torch.Tensor | None = None  # float32, of blocks or rows
    down_scale: torch.Tensor | None = None

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both weights in float64."""
        pairs = (self.gate_up, self.gate_up_scale), (self.down, self.down_scale)
        gate_up, down = (
            weight.double() if scale is None else weight.double() * _spread(scale, weight.shape)
            for weight, scale in pairs
        )
        return gate_up, down


class ExpertKernel(Protocol):
    """An expert kernel of one library in one format."""

    name: str
    format: str  # "bf16", "fp8-block" or "fp8-channel"

    def order(self, masters: Masters, rank: int) -> list[torch.Tensor]:
        """What the kernel reads of each expert, (L, ...) each, in its own order."""

    def prepare(self, tensors: list[torch.Tensor], rank: int) -> Compute:
        """Compute for ``tensors`` (L + S, ...) of a rank.

        Takes x (N, H), weights (N, K) float32 and physical ids (N, K) int32.
        """


def make_masters(sizes: Sizes, kind: str, device: torch.device) -> list[Masters]:
    """Random weights of all ranks; outputs are about as large as inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.empty(shape, dtype=torch.float32, device=device)
        values.normal_(0.0, shape[2] ** -0.5, generator=generator)
        return _quantised(values, kind)

    def of_rank() -> Masters:
        masters = sizes.shape.num_masters
        gate_up, gate_up_scale = weight(masters, 2 * sizes.inner, sizes.hidden)
        down, down_scale = weight(masters, sizes.hidden, sizes.inner)
        return Masters(gate_up, down, gate_up_scale, down_scale)

    return [of_rank() for _ in range(sizes.shape.num_ranks)]


def kernel_layer(
    sizes: Sizes, kernel: ExpertKernel, masters: list[Masters], device: torch.device
) -> tuple[VirtualRanks, list[Compute]]:
    """Ranks whose slots are empty, and each one's kernel over its masters and slots.

    ValueError where an expert is not one piece of memory: that could not be copied.
    """
    ordered = [kernel.order(own, rank) for rank, own in enumerate(masters)]
    orders = [_order_in_memory(tensor) for tensor in ordered[0]]
    expert_bytes = tuple(tensor[0].numel() * tensor.element_size() for tensor in ordered[0])
    ranks = make_ranks(sizes.shape, expert_bytes, MOST_CHUNK_BYTES, device)
    computes = []
    for rank, tensors in enumerate(ordered):
        views = []
        for tensor, memory, order in zip(tensors, ranks.experts[rank], orders, strict=True):
            dense = tensor.permute(order)
            view = memory.view(tensor.dtype).view(sizes.shape.num_local, *dense.shape[1:])
            view[: sizes.shape.num_masters] = dense
            views.append(view.permute(_inverse(order)))
        computes.append(kernel.prepare(views, rank))
    ranks.empty_slots()
    return ranks, computes


def _order_in_memory(tensor: torch.Tensor) -> list[int]:
    """Dimensions by stride; the expert's is the first."""
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d]))
    if order[0] != 0 or not tensor.permute(order).is_contiguous():
        raise ValueError(f"{tensor.shape}, strides {tensor.stride()}: experts lie interleaved")
    return order


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dimension) for dimension in range(len(order))]


def _quantised(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights (L, rows, columns) in a format, and what they are to be multiplied with."""
    if kind == "bf16":
        return values.bfloat16(), None
    if kind == "fp8-channel":
        scale = values.abs().amax(dim=2, keepdim=True) / _LARGEST_FP8
    else:
        count, rows, columns = values.shape
        blocks = values.view(count, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax(dim=(2, 4)) / _LARGEST_FP8
    return (values / _spread(scale, values.shape)).to(torch.float8_e4m3fn), scale


def _spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """One scale for each weight."""
    if scale.shape[2] == 1 and scale.shape[1] == shape[1]:
        return scale
    return scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def each_expert(masters: list[Masters]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Logical expert and both its weights in float64."""
    expert = 0
    for own in masters:
        for gate_up, down in zip(*own.exact(), strict=True):
            yield expert, gate_up, down
            expert += 1
