"""The layout of a ring file: one header page, then fixed-size records.

Record number n (from 0) is at index ``n % capacity`` and carries ``seq = n + 1``; 0 means never
written. A reader accepts a record only when its ``seq`` is the expected one and its ``crc``
matches, so a half-overwritten record is detected without locks or memory barriers.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum, IntEnum
from typing import Annotated, Any

import numpy as np

from ultraep_serve.errors import RingError
from ultraep_serve.system.topology import Location, domains_fit, is_process_alive, process_namespace
from ultraep_serve.telemetry.record import padded, record_dtype, stored_types
from ultraep_serve.types import CheckResult, Decision, ExpertShape, Policy, Stage, VerificationCheck

RING_VERSION = 13
MAGIC = b"UEPRING\x01"
HEADER_BYTES = 4096
UNHEARD_BYTES = 512
SELF_CHECK_BYTES = 1536
MAX_CAPACITY = 1 << 20
RING_RECORDS = 4096  # that a server's rank keeps for the sidecar
MAX_RANKS = 4096
_MAX_SLOTS = 1024
MAX_EXPERTS = 1 << 20
ALIVE_SECONDS = 5.0  # a writer without a heartbeat for longer is not alive
_DETAIL = 240  # characters of a check's texts, fewer where all together have no room


class RingState(IntEnum):
    """Where a rank is in its life."""

    STARTING = 0
    READY = 1
    FAILED = 2
    STOPPED = 3


class SelfCheckOutcome(str, Enum):
    PASSED = "passed"
    OFF = "off"  # nothing but costs and experts was looked at
    FAILED = "failed"  # the last of its checks has


@dataclass(frozen=True)
class SelfCheck:
    """How the self-check ended, and what each check of it has found."""

    outcome: SelfCheckOutcome
    checks: tuple[CheckResult, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    def to_json(self, max_bytes: int) -> str:
        """One line of ASCII, at most ``max_bytes`` long; long texts are cut."""
        most = _DETAIL
        while len(text := self._to_json(most)) > max_bytes and most:
            most //= 2
        return text

    def _to_json(self, most: int) -> str:
        checks = [
            asdict(check)
            | {
                "seconds": round(check.seconds, 6),
                "detail": check.detail[:most],
                "warning": check.warning[:most],
            }
            for check in self.checks
        ]
        return json.dumps([self.outcome.value, checks])

    @classmethod
    def from_json(cls, text: str) -> "SelfCheck | None":
        """The inverse of ``to_json``; None where ``text`` is empty or damaged."""
        try:
            outcome, checks = json.loads(text)
            return cls(SelfCheckOutcome(outcome), tuple(CheckResult(**check) for check in checks))
        except (ValueError, TypeError, RecursionError):
            return None


_Count = Annotated[int, "<u8"]
_Small = Annotated[int, "<u4"]
_ByDecision = Annotated[tuple[int, ...], "<u8", len(Decision)]
_ByCheck = Annotated[tuple[int, ...], "<u8", len(VerificationCheck)]


@dataclass(frozen=True)
class RingHeader:
    """A ring's header at one moment; counters are since this ring was created.

    Each field is annotated with its type in the file, behind the magic word and in this order:
    those of 8 bytes come first, so that every counter is aligned and stored in one piece.
    """

    written: _Count  # records ever written
    lost: _Count  # records that could not be written
    heartbeat_ns: _Count  # CLOCK_MONOTONIC
    last_batch_ns: _Count  # CLOCK_MONOTONIC, when a batch was last counted; 0: never
    started_ns: _Count  # wall clock
    state: Annotated[RingState, "<u8"]
    policy: Annotated[Policy, "<u8"]  # now in force, by its code
    batches: _Count  # batches seen, planned or not
    recorded_batches: _ByDecision  # batches that have records
    skipped_batches: _ByDecision  # batches skipped as a whole, without records
    layers: _ByDecision  # layers of both kinds of batches
    bytes_sent: _Count
    bytes_received: _Count
    replicas: _Count
    copied: _Count
    stage_ns: Annotated[tuple[int, ...], "<u8", len(Stage)]
    verified_layers: _ByCheck  # layers of batches that were checked
    verification_failures: _ByCheck
    verification_ns: _Count  # that the checks took in the path of batches
    slot_bytes_reserved: _Count
    pid: _Count
    process_namespace: _Count  # in which pid means that process
    schema_version: _Small
    header_bytes: _Small
    record_bytes: _Small
    capacity: _Small
    rank: _Small  # in its group, which is all ranks of its pipeline stage
    num_ranks: _Small
    host_size: _Small  # ranks of each host, contiguous; divides num_ranks
    domain_size: _Small  # ranks that weights move between
    num_logical_experts: _Small
    num_replica_slots: _Small
    num_layers: _Small  # of the rank's pipeline stage
    pipeline_stage: _Small
    num_pipeline_stages: _Small
    engine: Annotated[str, "S32"]
    mode: Annotated[str, "S16"]
    first_host: Annotated[str, "S64"]  # name of the host that holds rank 0
    unheard: Annotated[str, f"S{UNHEARD_BYTES}"]  # ranks and hosts it does not hear; empty: none
    # in JSON; None, which is empty, until it has ended
    self_check: Annotated[SelfCheck | None, f"S{SELF_CHECK_BYTES}"]

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(self.num_ranks, self.num_logical_experts, self.num_replica_slots)

    @property
    def location(self) -> Location:
        return Location(**{field.name: getattr(self, field.name) for field in fields(Location)})

    @property
    def number(self) -> int:
        """The writer's place among all ranks, stage by stage."""
        return self.pipeline_stage * self.num_ranks + self.rank

    def heartbeat_age_seconds(self, now_ns: int) -> float:
        """Seconds between the last heartbeat and ``now_ns`` (CLOCK_MONOTONIC)."""
        return (now_ns - self.heartbeat_ns) / 1e9

    def last_batch_age_seconds(self, now_ns: int) -> float | None:
        """Seconds between the last batch and ``now_ns`` (CLOCK_MONOTONIC); None before any."""
        return (now_ns - self.last_batch_ns) / 1e9 if self.last_batch_ns else None

    def alive(self, now_ns: int) -> bool:
        """Whether the last heartbeat is recent and the writer has not failed, stopped or died.

        A heartbeat from the future was written before a reboot: not alive.
        """
        age = self.heartbeat_age_seconds(now_ns)
        running = self.state in (RingState.STARTING, RingState.READY)
        return running and not self.dead and -ALIVE_SECONDS < age < ALIVE_SECONDS

    @property
    def dead(self) -> bool:
        """Whether the writer's process is known to be gone; unknown across process namespaces."""
        known = self.process_namespace == process_namespace() != 0
        return known and not is_process_alive(self.pid)


_TYPES = stored_types(RingHeader)
HEADER_DTYPE = padded(
    [("magic", "S8"), *((name, kind, tuple(size)) for name, (kind, *size) in _TYPES.items())],
    HEADER_BYTES,
)


def header_page(shape: ExpertShape, location: Location, **others: Any) -> bytes:
    """The first page of a new ring; ``others`` are its further fields that are not 0."""
    values = asdict(location) | {
        "magic": MAGIC,
        "schema_version": RING_VERSION,
        "header_bytes": HEADER_BYTES,
        "record_bytes": record_dtype(shape).itemsize,
        "num_logical_experts": shape.num_logical_experts,
        "num_replica_slots": shape.num_slots,
    }
    page = np.zeros((), HEADER_DTYPE)
    for name, value in (values | others).items():
        page[name] = value.encode("ascii", errors="replace") if isinstance(value, str) else value
    return page.tobytes()


def parse_header(page: bytes, name: str) -> RingHeader:
    """The header in ``page``, checked field by field. Raises RingError, which says ``name``."""
    assert len(page) == HEADER_BYTES
    if not page.startswith(MAGIC):
        raise RingError(f"{name} is not a ring of ultraep_serve")
    stored = np.frombuffer(page, HEADER_DTYPE)[0].item()
    values = dict(zip(HEADER_DTYPE.names or (), map(_plain, stored), strict=True))
    if values["schema_version"] != RING_VERSION:
        raise RingError(
            f"{name} has schema version {values['schema_version']}, this reader knows "
            f"{RING_VERSION}; run the engine and the sidecar from the same installation"
        )
    if field := _damaged(values):
        raise RingError(f"{name} is damaged: {field} = {values[field]}")
    values["state"] = RingState(values["state"])
    values["policy"] = list(Policy)[values["policy"]]
    values["self_check"] = SelfCheck.from_json(values["self_check"])
    return RingHeader(**{name: values[name] for name in _TYPES})


def _plain(value: Any) -> Any:
    """``value`` of a header field as an int, text, or a tuple of ints."""
    if isinstance(value, bytes):
        return value.decode("ascii", errors="replace")
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


def _damaged(values: Mapping[str, Any]) -> str:
    """The first field in ``values`` that no writer would have left like this; empty: none."""
    ranges = {
        "header_bytes": (HEADER_BYTES, HEADER_BYTES),
        "capacity": (1, MAX_CAPACITY),
        "num_ranks": (1, MAX_RANKS),
        "rank": (0, values["num_ranks"] - 1),
        "num_pipeline_stages": (1, MAX_RANKS),
        "pipeline_stage": (0, values["num_pipeline_stages"] - 1),
        "host_size": (1, values["num_ranks"]),
        "domain_size": (1, values["num_ranks"]),
        "num_logical_experts": (1, MAX_EXPERTS),
        "num_replica_slots": (0, _MAX_SLOTS),
        "state": (0, len(RingState) - 1),
        "policy": (0, len(Policy) - 1),
        "written": (0, 1 << 62),
    }
    for name, (low, high) in ranges.items():
        if not low <= values[name] <= high:
            return name
    if values["num_ranks"] % values["host_size"]:
        return "host_size"
    if not domains_fit(values["domain_size"], values["host_size"], values["num_ranks"]):
        return "domain_size"
    sizes = ("num_ranks", "num_logical_experts", "num_replica_slots")
    shape = ExpertShape(*(values[name] for name in sizes))
    return "" if values["record_bytes"] == record_dtype(shape).itemsize else "record_bytes"
