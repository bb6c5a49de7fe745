"""What a layer tells of a batch: one statement of its columns, from which all the rest follows.

The dtype of a stored record, how it is written and how it is read come from ``LayerRecord``.
``LayerOutcome`` derives what a layer's plan means for the ranks, for every backend alike.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.types import Decision, ExpertShape, IntArray, Policy, Stage

__all__ = [
    "LayerOutcome",
    "LayerPlace",
    "LayerRecord",
    "RecordArray",
    "padded",
    "rank_loads",
    "record_checksum",
    "record_dtype",
    "stored_record",
]

RecordArray = NDArray[np.void]
_Integers = NDArray[np.integer]


@dataclass(frozen=True)
class LayerOutcome:
    """What was decided for a layer's load; the same on every rank."""

    decision: Decision
    policy: Policy
    expert_load: _Integers  # (E,) assignments per logical expert
    speed: _Integers  # (R,) what was planned with; FULL_SPEED: as fast as the fastest
    slot_expert: IntArray  # (R, S) the replicas; -1: none
    slot_load: IntArray  # (R, S) assignments that each replica computes; 0 where there is none

    @cached_property
    def _rank_loads(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        columns = self.expert_load, self.speed, self.slot_expert, self.slot_load
        return rank_loads(np.array([self.decision]), *(column[None] for column in columns))

    @property
    def load_before(self) -> NDArray[np.int64]:
        """Assignments per rank (R,) where masters compute everything."""
        return self._rank_loads[0].reshape(-1)

    @property
    def load_after(self) -> NDArray[np.int64]:
        """Assignments per rank (R,) as they are computed: masters compute what replicas do not."""
        return self._rank_loads[1].reshape(-1)


def rank_loads(
    decision: _Integers,
    expert_load: _Integers,
    speed: _Integers,
    slot_expert: _Integers,
    slot_load: _Integers,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``load_before`` and ``load_after`` (N, R) of N layers, whose outcomes are given."""
    num_layers, num_ranks = speed.shape
    by_rank = expert_load.reshape(num_layers, num_ranks, -1)
    # over axes as short as these ``einsum`` is faster than ``sum``
    before: NDArray[np.int64] = np.einsum("nrm->nr", by_rank).astype(np.int64)
    taken = np.einsum("nrs->nr", slot_load)
    layer = np.arange(0, before.size, num_ranks)[:, None, None]
    owner = layer + np.maximum(slot_expert, 0) // by_rank.shape[2]
    given = np.bincount(owner.reshape(-1), slot_load.reshape(-1), before.size)
    after = before + taken - given.astype(np.int64).reshape(before.shape)
    forced = decision == Decision.FORCED.value
    if forced.any():
        total, speeds = (each[forced].sum(axis=1, keepdims=True) for each in (before, speed))
        after[forced] = total * speed[forced] // speeds
    return before, after


class LayerPlace(NamedTuple):
    """Which layer of which batch."""

    batch: int
    layer: int
    tokens: int  # of the batch, over all ranks


class LayerRecord(NamedTuple):
    """One MoE layer of one batch, as one rank tells it; ``of`` makes one.

    Each field is annotated with its type in memory, and the sizes that it has per record.
    """

    batch: Annotated[int, "<u8"]
    assignments: Annotated[int, "<u8"]
    bytes_sent: Annotated[int, "<u8"]
    bytes_received: Annotated[int, "<u8"]
    experts_ns: Annotated[int, "<u8"]  # that this rank's own experts took; 0: not measured
    layer: Annotated[int, "<i4"]
    tokens: Annotated[int, "<u4"]
    replicas: Annotated[int, "<u4"]  # on all ranks
    decision: Annotated[int, "<u2"]  # Decision
    policy: Annotated[int, "<u2"]  # Policy.code
    stage_ns: Annotated[Sequence[int], "<u8", "stages"]  # duration per Stage; 0: did not run
    load_before: Annotated[_Integers, "<i4", "ranks"]  # as in LayerOutcome, and so on
    load_after: Annotated[_Integers, "<i4", "ranks"]
    speed: Annotated[_Integers, "<i4", "ranks"]
    slot_expert: Annotated[_Integers, "<i4", "ranks", "slots"]
    slot_load: Annotated[_Integers, "<i4", "ranks", "slots"]
    expert_load: Annotated[_Integers, "<i4", "experts"]
    own_load: Annotated[_Integers, "<i4", "experts"]  # of this rank's own tokens

    @classmethod
    def of(
        cls,
        place: LayerPlace,
        outcome: LayerOutcome,
        own_load: _Integers,
        rank: int,
        expert_bytes: int,
        bytes_sent: int,
        stage_ns: Sequence[int],
        experts_ns: int,
    ) -> "LayerRecord":
        """The record of ``rank``, whose own tokens have ``own_load`` (E,).

        Tokens that all ranks see are rank 0's own. An expert of this layer has ``expert_bytes``.
        """
        received = [sum(expert >= 0 for expert in slots) for slots in outcome.slot_expert.tolist()]
        return cls(
            batch=place.batch,
            assignments=int(outcome.load_before.sum()),
            bytes_sent=bytes_sent,
            bytes_received=received[rank] * expert_bytes,
            experts_ns=experts_ns,
            layer=place.layer,
            tokens=place.tokens,
            replicas=sum(received),
            decision=outcome.decision,
            policy=outcome.policy.code,
            stage_ns=stage_ns,
            load_before=outcome.load_before,
            load_after=outcome.load_after,
            speed=outcome.speed,
            slot_expert=outcome.slot_expert,
            slot_load=outcome.slot_load,
            expert_load=outcome.expert_load,
            own_load=own_load,
        )


# Before the fields of a record; the checksum covers what comes after itself.
_PREFIX: list[Any] = [("seq", "<u8"), ("crc", "<u8"), ("time_ns", "<u8")]
_CRC = slice(8, 16)
_FIELDS: dict[str, tuple[str, ...]] = {
    name: hint.__metadata__
    for name, hint in get_type_hints(LayerRecord, include_extras=True).items()
}


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
