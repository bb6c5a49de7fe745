"""How loaded layers are extended by replica slots and computed; knows no engine.

Every adapter has two executions, for one of which it decides when layers are loaded:
``CpuExperts``, where the adapter computes experts itself, and ``DeviceExperts``, where the engine's
own dispatch and kernels are extended by the replica slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.setup import BalancedLayers, EngineRank, balanced_ids
from ultraep_serve.engines.common.shared_values import SharedValues, require_agreement
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.types import ExpertShape, TokenView

__all__ = [
    "Execution",
    "LoadedLayers",
    "compute_balanced",
    "compute_in_parts",
    "start_balancing",
    "summed",
]

Layer = TypeVar("Layer")  # an engine's MoE layer


class Execution(ABC, Generic[Layer]):
    """The parts of a layer that differ between CPU and GPU."""

    @abstractmethod
    def check(self, layer: Layer) -> None:
        """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced here."""

    @abstractmethod
    def resize(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        """Have ``layers`` serve ``after`` physical experts on this rank instead of ``before``.

        ``parameters`` have rows for the masters alone meanwhile. Raises UnsupportedError.
        """

    @abstractmethod
    def compute(
        self, layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's part of the output (T, H) for ``x`` (T, H), outside of a batch.

        ``topk_weights`` and ``physical`` (T, K). All ranks call it together.
        """

    def give_slots(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Announce the slots to ``layers``' engine; ``parameters`` get rows for them afterwards.

        Ids are physical after this. Raises UnsupportedError.
        """
        self.resize(layers, parameters, shape.num_masters, shape.num_local)

    def take_slots_back(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Undo ``give_slots``; masters that have been moved stay where they are."""
        for of_layer in parameters:
            for parameter in of_layer:
                parameter.data = parameter.data[: shape.num_masters]
        self.resize(layers, parameters, shape.num_local, shape.num_masters)


@dataclass(frozen=True)
class LoadedLayers(Generic[Layer]):
    """The MoE layers of one rank, in the order they run; their weights are final."""

    layers: Sequence[Layer]
    parameters: Sequence[Sequence[nn.Parameter]]  # those (L, ...) that make up a layer's experts
    shared: Sequence[SharedValues | UnsupportedError]  # what experts of a layer have in common
    shape: ExpertShape
    view: TokenView
    experts_per_token: int  # K
    hidden_size: int  # H
    dtype: torch.dtype  # of the layers' input and output


def start_balancing(
    config: BalanceConfig,
    execution: Execution[Layer],
    loaded: LoadedLayers[Layer],
    own: EngineRank,
    complete: Callable[[torch.Tensor], torch.Tensor],
) -> BalancedLayers:
    """Give slots to all layers and join the ranks; slots are taken back where that fails.

    ``complete`` makes the whole output (T, H) of what ``execution`` computes on each rank, for the
    self-check. All ranks call this together. Raises UnsupportedError, and what ``BalancedLayers``
    raises.
    """
    layers, parameters, shape = loaded.layers, loaded.parameters, loaded.shape
    device = parameters[0][0].device
    assert own.group is not None, "engines have a group of all ranks"
    require_agreement(loaded.shared, own.group.on_host, config)
    answers = _answers(execution, loaded, own.rank, complete)
    own = replace(own, answers=answers)
    row = torch.ones((1, loaded.hidden_size), dtype=loaded.dtype, device=device)
    run_layer = partial(
        compute_balanced, execution, layers[0], shape, loaded.view, loaded.experts_per_token, row
    )
    try:
        execution.give_slots(layers, parameters, shape)
        return BalancedLayers(config, shape, loaded.view, parameters, run_layer, own)
    except UnsupportedError:
        execution.take_slots_back(layers, parameters, shape)
        raise


def _answers(
    execution: Execution[Layer],
    loaded: LoadedLayers[Layer],
    rank: int,
    complete: Callable[[torch.Tensor], torch.Tensor],
) -> Answers:
    def compute(
        index: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        # kernels may write their output into x, or empty it
        return complete(execution.compute(loaded.layers[index], x.clone(), weights, physical))

    return Answers(
        compute=compute,
        experts_per_token=loaded.experts_per_token,
        hidden_size=loaded.hidden_size,
        dtype=loaded.dtype,
        device=loaded.parameters[0][0].device,
        seed=rank if loaded.view is TokenView.OWN else 0,
    )


def summed(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum in float32 of the ranks' parts of an ``output`` (T, H) of the same tokens."""
    total = output.float()
    dist.all_reduce(total, group=group)
    return total


def compute_balanced(
    execution: Execution[Layer],
    layer: Layer,
    shape: ExpertShape,
    view: TokenView,
    top_k: int,
    row: torch.Tensor,
    num_assignments: int,
) -> None:
    """Compute ``layer`` for a batch that gives every rank's masters so many assignments.

    For the cost model. Every token of the batch is ``row`` (1, H). All ranks call it together. On a
    device the batch is launched, and nobody waits for it.
    """
    seen = num_assignments * (shape.num_ranks if view is TokenView.SHARED else 1)
    ids = balanced_ids(shape, seen, top_k, row.device)
    x = row.expand(ids.shape[0], -1).contiguous()
    execution.compute(layer, x, torch.ones(ids.shape, device=row.device), ids)


def compute_in_parts(
    compute: Callable[..., torch.Tensor], most: int, *tensors: torch.Tensor
) -> torch.Tensor:
    """Outputs (T, H) of ``compute`` for ``tensors`` (T, ...), at most ``most`` rows at once."""
    with torch.inference_mode():
        parts = zip(*(torch.split(tensor, most) for tensor in tensors), strict=True)
        return torch.cat([compute(*part) for part in parts])
