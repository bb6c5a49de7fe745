"""What an adapter describes of its engine: a rank, its MoE layers, and how they are computed."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic

import torch
import torch.distributed as dist
from torch import nn

from ultraep_serve.balance.agreement import SharedValues
from ultraep_serve.balance.backend import LayerBalancer
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.engines.common.weights import ExpertWeights, Layer
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.system.topology import PipelineStage
from ultraep_serve.types import ExpertShape, TokenView


@dataclass(frozen=True)
class EngineRank:
    """A rank as its engine knows it."""

    engine: str  # "vllm", "sglang"
    rank: int
    group: EngineGroup
    pipeline: PipelineStage = field(default_factory=PipelineStage)  # the stage of all ranks
    cache_bytes: int = 0  # of a CPU's memory that the engine has yet to take for keys and values


@dataclass(frozen=True)
class LoadedLayers(Generic[Layer]):
    """The MoE layers of one rank, in the order they run; their weights are final."""

    weights: Sequence[ExpertWeights[Layer]]
    shared: Sequence[SharedValues]  # what experts of a layer have in common
    shape: ExpertShape
    view: TokenView
    experts_per_token: int  # K
    hidden_size: int  # H
    dtype: torch.dtype  # of the layers' input and output
    largest_batch: int | None  # tokens over all ranks; None: the engine sets no bound


class Execution(ABC, Generic[Layer]):
    """How an engine computes layers; all ranks call it alike."""

    @abstractmethod
    def give_slots(self, layers: Sequence[ExpertWeights[Layer]], shape: ExpertShape) -> None:
        """Have ``layers`` serve L + S physical experts on this rank instead of L.

        Ids are physical from then on, and the layers' dispatch is balanced. Parameters have rows
        for the masters alone meanwhile. Raises UnsupportedError.
        """

    @abstractmethod
    def take_slots(self, layers: Sequence[ExpertWeights[Layer]], shape: ExpertShape) -> None:
        """Have ``layers`` serve what they did before ``give_slots``, some of which it may have."""

    def keep_slots(self) -> None:
        """Give up what ``take_slots`` would need: the layers stay balanced."""

    @abstractmethod
    def compute(
        self, layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """The whole output (T, H) for this rank's tokens ``x`` (T, H), outside of a batch.

        ``topk_weights`` and ``physical`` (T, K).
        """

    @abstractmethod
    def kernel(self, layer: Layer) -> object:
        """What dispatches and computes ``layer``; another one, where weights were made anew."""


class Flow:
    """What the stages of a model's layers call: the balancer, or nothing, in the same order."""

    def __init__(self) -> None:
        self.balancer: LayerBalancer | None = None  # None: ids are taken as they come

    def micro_batch(self) -> int:
        """Which of those that overlap runs now."""
        return 0

    def receive(self) -> None:
        if self.balancer is not None:
            self.balancer.receive(self.micro_batch())

    def experts_done(self) -> None:
        if self.balancer is not None:
            self.balancer.experts_done(self.micro_batch())

    def computed(self) -> None:
        if self.balancer is not None:
            self.balancer.computed(self.micro_batch())

    @contextmanager
    def unbalanced(self) -> Iterator[None]:
        """Take ids as they come within: they are physical already."""
        balancer, self.balancer = self.balancer, None
        try:
            yield
        finally:
            self.balancer = balancer


@dataclass(frozen=True)
class MovableLayers:
    """The same layers as balancing knows them, by the tensors that make up their experts."""

    parameters: Sequence[Sequence[nn.Parameter]]  # (L, ...) by layer, in the order they run
    shape: ExpertShape
    view: TokenView
    # computes the first layer for a batch that gives every rank's masters so many assignments, to
    # be timed; all ranks call it together
    run_first: Callable[[int], None]
    answers: Answers | None = None  # None: the self-check cannot compare outputs
    largest_batch: int | None = None  # assignments over all ranks; None: the engine sets no bound
    experts_per_token: int = 1


def movable(execution: Execution[Layer], loaded: LoadedLayers[Layer], rank: int) -> MovableLayers:
    """``loaded`` on ``rank``, computed by ``execution``."""
    return MovableLayers(
        parameters=[layer.parameters for layer in loaded.weights],
        shape=loaded.shape,
        view=loaded.view,
        run_first=functools.partial(_run_first, execution, loaded),
        answers=_answers(execution, loaded, rank),
        largest_batch=loaded.largest_batch and loaded.largest_batch * loaded.experts_per_token,
        experts_per_token=loaded.experts_per_token,
    )


def _answers(execution: Execution[Layer], loaded: LoadedLayers[Layer], rank: int) -> Answers:
    def compute(
        index: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        # kernels may write their output into x, or empty it
        return execution.compute(loaded.weights[index].layer, x.clone(), weights, physical)

    return Answers(
        compute=compute,
        experts_per_token=loaded.experts_per_token,
        hidden_size=loaded.hidden_size,
        dtype=loaded.dtype,
        device=loaded.weights[0].parameters[0].device,
        seed=rank if loaded.view is TokenView.OWN else 0,
    )


def _run_first(
    execution: Execution[Layer], loaded: LoadedLayers[Layer], num_assignments: int
) -> None:
    """Compute a batch that gives every rank's masters so many assignments, for the cost model.

    All of its tokens are alike. On a device the batch is launched, and nobody waits for it.
    """
    device, shape = loaded.weights[0].parameters[0].device, loaded.shape
    seen = num_assignments * (shape.num_ranks if loaded.view is TokenView.SHARED else 1)
    ids = balanced_ids(shape, seen, loaded.experts_per_token, device)
    x = torch.ones((ids.shape[0], loaded.hidden_size), dtype=loaded.dtype, device=device)
    execution.compute(loaded.weights[0].layer, x, torch.ones(ids.shape, device=device), ids)


@functools.lru_cache(maxsize=1)
def balanced_ids(
    shape: ExpertShape, num_assignments: int, experts_per_token: int, device: torch.device
) -> torch.Tensor:
    """Physical ids (T, K) int32 of masters in turn, at least one token; for measuring.

    They are made on ``device``, once for all repetitions; not to be written to.
    """
    num_tokens = max(1, num_assignments // experts_per_token)
    turn = torch.arange(num_tokens * experts_per_token, device=device) % shape.num_logical_experts
    table = identity_table(shape.num_logical_experts, shape.num_ranks, shape.num_slots)
    return torch.from_numpy(table).to(device)[turn].view(num_tokens, experts_per_token)


def summed(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum in float32 of the ranks' parts of an ``output`` (T, H) of the same tokens."""
    total = output.float()
    dist.all_reduce(total, group=group)
    return total


def require_one_number(num_experts: Collection[int]) -> None:
    """Raise UnsupportedError unless all layers have the same number of experts."""
    if len(numbers := set(num_experts)) > 1:
        raise UnsupportedError(
            f"MoE layers with different numbers of experts {sorted(numbers)} share no slots"
        )
