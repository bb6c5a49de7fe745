"""One MoE layer in detail."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import (
    LayerSnapshot,
    RankAssignments,
    imbalance_snapshot,
    mean_floor,
    replica_count,
)
from ultraep_serve.observability.summary import bytes_by_layer

__all__ = ["LayerDetail", "layer_detail"]


@dataclass(frozen=True)
class LayerDetail(LayerSnapshot):
    """A layer, the load of each rank in it and where its replicas were in its last batch."""

    ranks: list[RankAssignments]
    """By rank, over the window."""
    last_batch: int
    last_slot_expert: list[list[int]]
    """(ranks, slots): logical expert in each replica slot in the last batch, -1 empty."""
    schema_version: int = SCHEMA_VERSION


def layer_detail(
    layer: int,
    lead: RecordArray,
    ranks: Sequence[RecordArray],
    domain_size: int | None = None,
) -> LayerDetail | None:
    """Layer ``layer`` from the weighed records of the lead and of every rank; None without any.

    Without ``domain_size`` all ranks are one domain.
    """
    records = lead[lead["layer"] == layer]
    if not len(records):
        return None
    before = records["load_before"].sum(axis=0, dtype=np.int64).tolist()
    after = records["load_after"].sum(axis=0, dtype=np.int64).tolist()
    return LayerDetail(
        layer=layer,
        records=len(records),
        imbalance=imbalance_snapshot(records),
        floor=mean_floor(records["load_before"], domain_size or records["load_before"].shape[1]),
        replicas=replica_count(records["replicas"]),
        bytes_moved=bytes_by_layer(ranks).get(layer, 0),
        ranks=[RankAssignments(b, a) for b, a in zip(before, after, strict=True)],
        last_batch=int(records["batch"][-1]),
        last_slot_expert=records["slot_expert"][-1].tolist(),
    )
