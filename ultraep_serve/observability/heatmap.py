"""How full each rank was in each layer, before and after."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray

__all__ = ["Heatmap", "heatmap"]


@dataclass(frozen=True)
class Heatmap(Documented):
    """Load of each rank in each MoE layer, over the window."""

    layers: list[int]
    """The layers that the rows stand for."""
    records: int
    """Records that it was made from."""
    before: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, by routing alone."""
    after: list[list[float]]
    """Per layer and rank: assignments over the mean of the layer's ranks, as computed."""
    schema_version: int = SCHEMA_VERSION


def heatmap(records: RecordArray) -> Heatmap:
    """From the lead's weighed ``records``."""
    order = np.argsort(records["layer"], kind="stable")
    layers, starts = np.unique(records["layer"][order], return_index=True)
    before = _relative(records["load_before"], order, starts)
    after = _relative(records["load_after"], order, starts)
    return Heatmap(layers.tolist(), len(records), before.tolist(), after.tolist())


def _relative(
    loads: NDArray[np.integer], order: NDArray[np.intp], starts: NDArray[np.intp]
) -> NDArray[np.float64]:
    if not len(starts):
        return np.empty((0, loads.shape[1]))
    totals = np.add.reduceat(loads[order], starts, axis=0, dtype=np.int64)
    mean = totals.mean(axis=1, keepdims=True)
    relative: NDArray[np.float64] = np.round(totals / np.where(mean > 0, mean, 1), 4)
    return relative
