"""What a layer tells of a batch: one statement of its columns, from which all the rest follows.

The dtype of a stored record, how it is written and how it is read come from ``LayerRecord``.
"""

import zlib
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.types import Decision, ExpertShape, Outcome, Stage

RecordArray = NDArray[np.void]


def rank_loads(found: Outcome) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``load_before`` and ``load_after`` (N, R) of N layers."""
    num_layers, num_ranks = found.speed.shape
    by_rank = found.expert_load.reshape(num_layers, num_ranks, -1)
    # over axes as short as these ``einsum`` is faster than ``sum``
    before: NDArray[np.int64] = np.einsum("nrm->nr", by_rank).astype(np.int64)
    taken = np.einsum("nrs->nr", found.slot_load)
    layer = np.arange(0, before.size, num_ranks)[:, None, None]
    owner = layer + np.maximum(found.slot_expert, 0) // by_rank.shape[2]
    given = np.bincount(owner.reshape(-1), found.slot_load.reshape(-1), before.size)
    after = before + taken - given.astype(np.int64).reshape(before.shape)
    forced = found.decision == Decision.FORCED.value
    if forced.any():
        total, speeds = (each[forced].sum(axis=1, keepdims=True) for each in (before, found.speed))
        after[forced] = total * found.speed[forced] // speeds
    return before, after


class LayerRecord(NamedTuple):
    """One MoE layer of one batch, as one rank tells it; or columns (N, ...) of so many.

    Each field is annotated with its type in memory, and the sizes that it has per record.
    """

    batch: Annotated[Any, "<u8"]
    bytes_sent: Annotated[Any, "<u8"]
    bytes_received: Annotated[Any, "<u8"]
    experts_ns: Annotated[Any, "<u8"]  # that this rank's own experts took; 0: not measured
    layer: Annotated[Any, "<i4"]
    tokens: Annotated[Any, "<u4"]
    replicas: Annotated[Any, "<u4"]  # that compute, on all ranks
    decision: Annotated[Any, "<u2"]  # Decision
    policy: Annotated[Any, "<u2"]  # Policy.code
    stage_ns: Annotated[Any, "<u8", "stages"]  # duration per Stage; 0: did not run
    load_before: Annotated[Any, "<i4", "ranks"]  # as of ``rank_loads``
    load_after: Annotated[Any, "<i4", "ranks"]
    speed: Annotated[Any, "<i4", "ranks"]
    slot_expert: Annotated[Any, "<i4", "ranks", "slots"]
    is_copied: Annotated[Any, "?", "ranks", "slots"]
    slot_load: Annotated[Any, "<i4", "ranks", "slots"]
    expert_load: Annotated[Any, "<i4", "experts"]
    own_load: Annotated[Any, "<i4", "experts"]  # of this rank's own tokens


# Before the fields of a record; the checksum covers what comes after itself.
_PREFIX: list[Any] = [("seq", "<u8"), ("crc", "<u8"), ("time_ns", "<u8")]
_CRC = slice(8, 16)


def stored_types(kind: type) -> dict[str, tuple[Any, ...]]:
    """By field of ``kind``, what that is annotated with: its type in memory, and sizes."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__ for name, hint in hints.items()}


_FIELDS = stored_types(LayerRecord)


@lru_cache(maxsize=8)
def record_dtype(shape: ExpertShape) -> np.dtype[np.void]:
    """A stored LayerRecord for ``shape``; its size is a multiple of 8 bytes."""
    sizes = {
        "stages": len(Stage),
        "ranks": shape.num_ranks,
        "slots": shape.num_slots,
        "experts": shape.num_logical_experts,
    }
    layout = [
        (name, dtype, tuple(sizes[axis] for axis in axes))
        for name, (dtype, *axes) in _FIELDS.items()
    ]
    size = np.dtype([*_PREFIX, *layout]).itemsize
    return padded([*_PREFIX, *layout], (size + 7) // 8 * 8)


def padded(layout: list[Any], itemsize: int) -> np.dtype[np.void]:
    """The packed structured dtype of ``layout``, padded at its end to ``itemsize`` bytes."""
    padding = itemsize - np.dtype(layout).itemsize
    return np.dtype([*layout, ("padding", "u1", (padding,))])


def record_checksum(seq: int, record: memoryview) -> int:
    """CRC-32 of a stored record, seeded by ``seq`` so that no record matches another's."""
    return zlib.crc32(record[_CRC.stop :], seq & 0xFFFFFFFF)


def stored_record(record: LayerRecord, shape: ExpertShape, layers: int = 1) -> RecordArray:
    """``record`` of N ``layers`` as it is stored, (N,), but for when; raises for bad values."""
    stored = np.empty(layers, record_dtype(shape))
    stored["padding"] = 0
    for name, values in record._asdict().items():
        stored[name] = values
    return stored
