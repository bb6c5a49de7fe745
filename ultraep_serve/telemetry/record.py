"""What a layer tells of a batch: one statement of its columns, from which all the rest follows.

The dtype of a stored record, how it is written and how it is read come from ``LayerRecord``.
``LayerOutcome`` derives what a layer's plan means for the ranks, for every backend alike.
"""

import struct
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
    "RecordBuffer",
    "aligned_dtype",
    "padded",
    "record_checksum",
    "record_dtype",
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
    def load_before(self) -> NDArray[np.int64]:
        """Assignments per rank (R,) where masters compute everything."""
        by_rank = self.expert_load.reshape(len(self.speed), -1)
        total: NDArray[np.int64] = by_rank.sum(axis=1, dtype=np.int64)
        return total

    @cached_property
    def load_after(self) -> NDArray[np.int64]:
        """Assignments per rank (R,) as they are computed: masters compute what replicas do not."""
        before = self.load_before
        if self.decision is Decision.FORCED:
            share: NDArray[np.int64] = before.sum() * self.speed // self.speed.sum(dtype=np.int64)
            return share
        num_masters, num_slots = self.expert_load.size // before.size, self.slot_expert.shape[1]
        after = before.tolist()
        loads = self.slot_load.reshape(-1).tolist()
        for slot, expert in enumerate(self.slot_expert.reshape(-1).tolist()):
            if expert >= 0:  # so few that NumPy is slower
                after[slot // num_slots] += loads[slot]
                after[expert // num_masters] -= loads[slot]
        return np.array(after, np.int64)


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
_NUM_SCALARS = list(_FIELDS).index("stage_ns")
_CODES = {"<u8": "Q", "<u4": "I", "<i4": "i", "<u2": "H"}
# All up to the loads, packed at once: setting each by NumPy takes ten times as long.
_HEAD = struct.Struct(
    "<"
    + "".join(_CODES[dtype] for _, dtype in _PREFIX)
    + "".join(_CODES[dtype] for dtype, *_ in list(_FIELDS.values())[:_NUM_SCALARS])
    + len(Stage) * "Q"
)


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


def aligned_dtype(*names: str) -> np.dtype[np.void]:
    """Some fields of a record, none of them of a run's sizes, for those who keep many.

    Sums over aligned fields are three times as fast.
    """
    whole = record_dtype(ExpertShape(1, 1, 0))
    return np.dtype([(name, whole[name]) for name in names], align=True)


def record_checksum(seq: int, record: memoryview) -> int:
    """CRC-32 of a stored record, seeded by ``seq`` so that no record matches another's."""
    return zlib.crc32(record[_CRC.stop :], seq & 0xFFFFFFFF)


class RecordBuffer:
    """Room for one record, filled again and again."""

    def __init__(self, shape: ExpertShape) -> None:
        self.content = bytearray(record_dtype(shape).itemsize)
        self._view = memoryview(self.content)
        stored = np.frombuffer(self.content, record_dtype(shape))[0]
        self._arrays = [stored[name] for name in list(_FIELDS)[_NUM_SCALARS + 1 :]]

    def fill(self, seq: int, time_ns: int, record: LayerRecord) -> None:
        """Be ``record``, the ``seq``-th, written at ``time_ns``. Raises for values of no record."""
        for target, values in zip(self._arrays, record[_NUM_SCALARS + 1 :], strict=True):
            target[...] = values
        head = (seq, 0, time_ns, *record[:_NUM_SCALARS], *record.stage_ns)
        _HEAD.pack_into(self.content, 0, *head)
        self.content[_CRC] = record_checksum(seq, self._view).to_bytes(8, "little")
