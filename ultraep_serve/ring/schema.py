"""The layout of a ring file: one header page, then fixed-size records.

Record number n (from 0) lives in place ``n % capacity`` and carries ``seq = n + 1``; 0 means
never written. A reader accepts a record only when its ``seq`` is the expected one and its ``crc``
matches, so a record caught half overwritten is noticed without locks or memory barriers.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import RingError
from ultraep_serve.topology import Location, is_process_alive, process_namespace
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage

__all__ = [
    "HEADER_BYTES",
    "HEADER_DTYPE",
    "MAGIC",
    "MAX_CAPACITY",
    "RECORD_HEAD",
    "RING_PREFIX",
    "RING_VERSION",
    "SCHEMA_VERSION",
    "RecordArray",
    "RingHeader",
    "RingState",
    "parse_header",
    "record_checksum",
    "record_dtype",
    "ring_path",
]

SCHEMA_VERSION = 2  # of what the HTTP interface answers
RING_VERSION = 4  # of the files
RING_PREFIX = "ring-"  # of the files' names, before the rank
MAGIC = b"UEPRING\x01"
HEADER_BYTES = 4096
MAX_CAPACITY = 1 << 20
_MAX_RANKS = 4096
_MAX_SLOTS = 1024
_MAX_EXPERTS = 1 << 20

RecordArray = NDArray[np.void]


class RingState(IntEnum):
    """How far a rank has come."""

    STARTING = 0
    READY = 1
    FAILED = 2
    STOPPED = 3


# 8-byte fields come first, so that every counter is aligned and stored in one piece.
_HEADER_FIELDS: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = [
    ("magic", "S8"),
    ("written", "<u8"),  # records ever written
    ("lost", "<u8"),  # records that could not be written
    ("heartbeat_ns", "<u8"),  # CLOCK_MONOTONIC
    ("started_ns", "<u8"),  # wall clock
    ("state", "<u8"),  # RingState
    ("policy", "<u8"),  # Policy.code now in force
    ("batches", "<u8"),  # batches seen, planned or not
    ("recorded_batches", "<u8", (16,)),  # by Decision: batches that have records
    ("skipped_batches", "<u8", (16,)),  # by Decision: batches skipped as a whole, without records
    ("layers", "<u8", (16,)),  # by Decision: layers of both kinds of batches
    ("bytes_sent", "<u8"),
    ("bytes_received", "<u8"),
    ("replicas", "<u8"),
    ("stage_ns", "<u8", (8,)),  # by Stage
    ("slot_bytes_reserved", "<u8"),
    ("pid", "<u8"),
    ("process_namespace", "<u8"),  # in which pid means that process
    ("timeout_seconds", "<f8"),
    ("schema_version", "<u4"),
    ("header_bytes", "<u4"),
    ("record_bytes", "<u4"),
    ("capacity", "<u4"),
    ("rank", "<u4"),
    ("num_ranks", "<u4"),
    ("num_logical_experts", "<u4"),
    ("num_replica_slots", "<u4"),
    ("num_layers", "<u4"),
    ("reserved", "<u4"),
    ("engine", "S32"),
    ("mode", "S16"),
    ("last_batch_ns", "<u8"),  # CLOCK_MONOTONIC, when a batch was last counted; 0: never
    ("host_size", "<u4"),  # ranks of each host, contiguous; divides num_ranks
    ("domain_size", "<u4"),  # ranks that weights move between; divides host_size
    ("first_host", "S64"),  # name of the host that holds rank 0
]


def _padded(fields: list[Any], itemsize: int) -> np.dtype[np.void]:
    """The packed structured dtype of ``fields``, padded at its end to ``itemsize`` bytes."""
    packed = np.dtype(fields)
    assert packed.fields is not None
    assert packed.names is not None
    assert packed.itemsize <= itemsize
    entries = [packed.fields[name] for name in packed.names]
    return np.dtype(
        {
            "names": list(packed.names),
            "formats": [entry[0] for entry in entries],
            "offsets": [entry[1] for entry in entries],
            "itemsize": itemsize,
        }
    )


HEADER_DTYPE = _padded(_HEADER_FIELDS, HEADER_BYTES)

# The scalars at the front of a record, as struct and (below) as dtype: seq, crc, layer, batch,
# time_ns, tokens, replicas, assignments, bytes_sent, bytes_received, stage_ns, decision, policy.
RECORD_HEAD = struct.Struct(f"<QIiQQIIQQQ{len(Stage)}QBB6x")
PAYLOAD_OFFSET = 12  # what the checksum covers starts after seq and crc


@lru_cache(maxsize=8)
def record_dtype(shape: ExpertShape) -> np.dtype[np.void]:
    """One record for ``shape``; its size is a multiple of 8 bytes.

    ``load_before`` and ``load_after`` (R,) are assignments per rank, ``slot_expert`` (R, S) the
    replicas, ``slot_load`` (R, S) what each of them computes, ``expert_load`` (E,) assignments per
    logical expert. A master computes what its replicas do not.
    """
    ranks, slots, experts = shape.num_ranks, shape.num_slots, shape.num_logical_experts
    fields = [
        ("seq", "<u8"),
        ("crc", "<u4"),
        ("layer", "<i4"),
        ("batch", "<u8"),
        ("time_ns", "<u8"),  # wall clock
        ("tokens", "<u4"),  # of the batch, over all ranks
        ("replicas", "<u4"),
        ("assignments", "<u8"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("stage_ns", "<u8", (len(Stage),)),
        ("decision", "u1"),
        ("policy", "u1"),
        ("reserved", "u1", (6,)),
        ("load_before", "<i4", (ranks,)),
        ("load_after", "<i4", (ranks,)),
        ("slot_expert", "<i4", (ranks, slots)),
        ("slot_load", "<i4", (ranks, slots)),
        ("expert_load", "<i4", (experts,)),
    ]
    size = np.dtype(fields).itemsize
    return _padded(fields, (size + 7) // 8 * 8)


def record_checksum(seq: int, record: memoryview) -> int:
    """CRC-32 of a record's payload, seeded by ``seq`` so that no payload passes for another's."""
    return zlib.crc32(record[PAYLOAD_OFFSET:], seq & 0xFFFFFFFF)


def ring_path(run_path: Path, rank: int) -> Path:
    """Where ``rank`` writes."""
    return run_path / f"{RING_PREFIX}{rank}"


@dataclass(frozen=True)
class RingHeader:
    """A ring's header at one moment; counters are since this ring was created."""

    shape: ExpertShape
    location: Location
    num_layers: int
    capacity: int
    record_bytes: int
    pid: int
    process_namespace: int
    engine: str
    mode: str
    slot_bytes_reserved: int
    timeout_seconds: float
    started_ns: int  # wall clock
    heartbeat_ns: int  # CLOCK_MONOTONIC
    last_batch_ns: int  # CLOCK_MONOTONIC; 0: no batch yet
    state: RingState
    policy: Policy
    written: int
    lost: int
    batches: int
    recorded_batches: tuple[int, ...]  # by Decision
    skipped_batches: tuple[int, ...]  # by Decision
    layers: tuple[int, ...]  # by Decision
    bytes_sent: int
    bytes_received: int
    replicas: int
    stage_ns: tuple[int, ...]  # by Stage

    @property
    def rank(self) -> int:
        """Of the whole group."""
        return self.location.rank

    def heartbeat_age_seconds(self, now_ns: int) -> float:
        """Seconds between the last heartbeat and ``now_ns`` (CLOCK_MONOTONIC)."""
        return (now_ns - self.heartbeat_ns) / 1e9

    def last_batch_age_seconds(self, now_ns: int) -> float | None:
        """Seconds between the last batch and ``now_ns`` (CLOCK_MONOTONIC); None before any."""
        return (now_ns - self.last_batch_ns) / 1e9 if self.last_batch_ns else None

    def alive(self, now_ns: int, limit_seconds: float) -> bool:
        """Whether the writer beats and has neither failed, stopped nor died.

        A heartbeat from the future is left over from another boot: not alive.
        """
        age = self.heartbeat_age_seconds(now_ns)
        running = self.state in (RingState.STARTING, RingState.READY)
        return running and not self.dead and -limit_seconds < age < limit_seconds

    @property
    def dead(self) -> bool:
        """Whether the writer's process is known to be gone; unknown across process namespaces."""
        known = self.process_namespace == process_namespace()
        return known and not is_process_alive(self.pid)


def parse_header(page: bytes, name: str) -> RingHeader:
    """The header in ``page``, checked field by field. Raises RingError, which says ``name``."""
    assert len(page) == HEADER_BYTES
    values = np.frombuffer(page, HEADER_DTYPE, count=1)[0]
    if values["magic"] != MAGIC:
        raise RingError(f"{name} is not a ring of ultraep_serve")
    version = int(values["schema_version"])
    if version != RING_VERSION:
        raise RingError(
            f"{name} has schema version {version}, this reader knows {RING_VERSION}; "
            "run the engine and the sidecar from the same installation"
        )
    _check_sizes(values, name)
    return _header_of(values)


def _check_sizes(values: Any, name: str) -> None:
    legal = {
        "header_bytes": (HEADER_BYTES, HEADER_BYTES),
        "capacity": (1, MAX_CAPACITY),
        "num_ranks": (1, _MAX_RANKS),
        "rank": (0, int(values["num_ranks"]) - 1),
        "host_size": (1, int(values["num_ranks"])),
        "domain_size": (1, int(values["host_size"])),
        "num_logical_experts": (1, _MAX_EXPERTS),
        "num_replica_slots": (0, _MAX_SLOTS),
        "state": (0, len(RingState) - 1),
        "policy": (0, len(Policy) - 1),
        "written": (0, 1 << 62),
    }
    for field, (low, high) in legal.items():
        if not low <= int(values[field]) <= high:
            raise RingError(f"{name} is damaged: {field} = {int(values[field])}")
    for part, whole in (("host_size", "num_ranks"), ("domain_size", "host_size")):
        if int(values[whole]) % int(values[part]):
            raise RingError(f"{name} is damaged: {part} = {int(values[part])}")
    if int(values["record_bytes"]) != record_dtype(_shape_of(values)).itemsize:
        raise RingError(f"{name} is damaged: record_bytes = {int(values['record_bytes'])}")
    if not math.isfinite(float(values["timeout_seconds"])):
        raise RingError(f"{name} is damaged: timeout_seconds = {float(values['timeout_seconds'])}")


def _shape_of(values: Any) -> ExpertShape:
    return ExpertShape(
        num_ranks=int(values["num_ranks"]),
        num_logical_experts=int(values["num_logical_experts"]),
        num_replica_slots=int(values["num_replica_slots"]),
    )


def _header_of(values: Any) -> RingHeader:
    def number(field: str) -> int:
        return int(values[field])

    def numbers(field: str, length: int) -> tuple[int, ...]:
        return tuple(values[field][:length].tolist())

    def text(field: str) -> str:
        return bytes(values[field]).decode("ascii", errors="replace")

    return RingHeader(
        shape=_shape_of(values),
        location=Location(
            rank=number("rank"),
            num_ranks=number("num_ranks"),
            host_size=number("host_size"),
            domain_size=number("domain_size"),
            first_host=text("first_host"),
        ),
        num_layers=number("num_layers"),
        capacity=number("capacity"),
        record_bytes=number("record_bytes"),
        pid=number("pid"),
        process_namespace=number("process_namespace"),
        engine=text("engine"),
        mode=text("mode"),
        slot_bytes_reserved=number("slot_bytes_reserved"),
        timeout_seconds=float(values["timeout_seconds"]),
        started_ns=number("started_ns"),
        heartbeat_ns=number("heartbeat_ns"),
        last_batch_ns=number("last_batch_ns"),
        state=RingState(number("state")),
        policy=list(Policy)[number("policy")],
        written=number("written"),
        lost=number("lost"),
        batches=number("batches"),
        recorded_batches=numbers("recorded_batches", len(Decision)),
        skipped_batches=numbers("skipped_batches", len(Decision)),
        layers=numbers("layers", len(Decision)),
        bytes_sent=number("bytes_sent"),
        bytes_received=number("bytes_received"),
        replicas=number("replicas"),
        stage_ns=numbers("stage_ns", len(Stage)),
    )
