"""What an adapter asks of its engine, on hosts and on GPUs alike; knows no engine.

Every adapter has two of these, for one of which it decides when layers are loaded: ``CpuExperts``,
where experts are computed by the adapter itself, and ``DeviceExperts``, where the engine's own
dispatch and kernels are extended by the replica slots.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from ultraep_serve.engines.common.setup import balanced_ids
from ultraep_serve.types import ExpertShape, TokenView

__all__ = ["Execution", "compute_balanced", "drop_slots"]

Layer = TypeVar("Layer", contravariant=True)  # an engine's MoE layer


class Execution(Protocol[Layer]):
    """The parts of a layer that differ between CPU and GPU."""

    def check(self, layer: Layer) -> None:
        """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced here."""

    def give_slots(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Announce the slots to ``layers``' engine; ``parameters`` get rows for them afterwards.

        Ids are physical from now on. Raises UnsupportedError.
        """

    def take_slots_back(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Undo ``give_slots``; masters that have been moved stay where they are now."""

    def compute(
        self, layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of the output (T, H) for ``x`` (T, H), outside of the engine's own pass.

        ``topk_weights`` and ``physical`` (T, K). All ranks call it together.
        """


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


def drop_slots(parameters: Sequence[Sequence[nn.Parameter]], shape: ExpertShape) -> None:
    """Leave only the masters' rows to all ``parameters``, whether they had slots or not."""
    for of_layer in parameters:
        for parameter in of_layer:
            parameter.data = parameter.data[: shape.num_masters]
