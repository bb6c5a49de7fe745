"""Rings for tests: one rank's, and records for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage
from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import Decision, ExpertShape, Policy

SHAPE = ExpertShape(num_ranks=4, num_logical_experts=20, num_replica_slots=2)


def create(
    run_path: Path,
    rank: int = 0,
    shape: ExpertShape = SHAPE,
    location: Location | None = None,
    pipeline: PipelineStage = ONLY_STAGE,
    **changes: Any,
) -> Recorder:
    """The ring of one rank in ``run_path``; ``changes`` are what ``Recorder.create`` takes."""
    settings: dict[str, Any] = {
        "num_layers": 3,
        "ring_records": 16,
        "engine": "vllm",
        "mode": "tensor",
        "slot_bytes": 4096,
    }
    place = location or Location.on_one_host(rank, shape.num_ranks)
    return Recorder.create(run_path, place, shape, pipeline, **(settings | changes))


def write(recorder: Recorder, batch: int, layer: Any = 0, **changes: Any) -> None:
    """Record a batch of one planned ``layer``, or of an array of them, all alike.

    ``changes`` are fields of ``LayerRecord``.
    """
    recorder.record_batch(planned(batch, layer, **changes), np.size(layer))


def write_all(
    recorders: Sequence[Recorder], batch: int, layer: Any = 0, first: int = 0, **changes: Any
) -> None:
    """Every rank from ``first`` on records the same; rank r sends r * 100 bytes."""
    for rank, recorder in enumerate(recorders, first):
        write(recorder, batch, layer, bytes_sent=100 * rank, **changes)


def planned(batch: int, layer: Any = 0, **changes: Any) -> LayerRecord:
    """The record of a planned layer; ``changes`` are fields of it."""
    fields: dict[str, Any] = {
        "tokens": 100,
        "decision": Decision.PLANNED,
        "policy": Policy.QUOTA,
        "replicas": 1,
        "bytes_sent": 10,
        "bytes_received": 20,
        "experts_ns": 0,
        "stage_ns": [1, 2, 3, 4, 5, 6, 7],
        "load_before": np.array([4, 0, 0, 0]),
        "load_after": np.array([1, 1, 1, 1]),
        "speed": FULL_SPEED,
        "slot_expert": -1,
        "slot_load": 0,
        "is_copied": False,
        "expert_load": 0,
        "own_load": 0,
    } | {name: value for name, value in changes.items() if value is not None}
    fields["policy"] = fields["policy"].code
    return LayerRecord(batch=batch, layer=layer, **fields)


class KeepsNothing:
    """A stand-in of a recorder, which is given one record after the other."""

    progress = 0

    def record(self, record: LayerRecord) -> None:
        """Keep a layer's record."""
        raise NotImplementedError

    def record_batch(self, layers: LayerRecord, number: int) -> None:
        """As ``Recorder.record_batch``, one by one."""
        for place in range(number):
            self.record(
                LayerRecord(*(each if np.ndim(each) == 0 else each[place] for each in layers))
            )

    def fail(self, reason: str) -> None:
        """As ``Recorder.fail``."""


def put(path: Path, content: bytes) -> None:
    """Another file under the name of a ring."""
    other = path.with_name("other")
    other.write_bytes(content)
    other.replace(path)
