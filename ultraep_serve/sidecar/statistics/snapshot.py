"""The data classes of an answer, as the HTTP interface documents them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.schema import RingHeader

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "SCHEMA_VERSION",
    "BalanceSnapshot",
    "BatchesCount",
    "Documented",
    "ImbalanceSnapshot",
    "LayerSnapshot",
    "PhaseSnapshot",
    "RankAssignments",
    "RankSnapshot",
    "RankView",
    "ReplicaCount",
    "Savings",
    "Spread",
]


SCHEMA_VERSION = 2  # of the answers


_ADAPTERS: "dict[type, TypeAdapter[Any]]" = {}  # building one takes milliseconds


def _adapter(answer_type: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # figures alone do without it

    if answer_type not in _ADAPTERS:
        _ADAPTERS[answer_type] = TypeAdapter(answer_type)
    return _ADAPTERS[answer_type]


class Documented:
    """Base of the dataclasses that the HTTP interface returns."""

    # pydantic reads this name; the text below a field becomes its description in OpenAPI.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"use_attribute_docstrings": True}

    @classmethod
    def prepare(cls) -> None:
        """Make the first ``encoded`` as fast as others."""
        _adapter(cls)

    def encoded(self) -> bytes:
        """This as JSON."""
        return _adapter(type(self)).dump_json(self)


@dataclass(frozen=True)
class Savings(Documented):
    """Estimated seconds that balancing saved and spent over the window."""

    saved_seconds: float
    """Time of the engine's part of each layer that balancing avoided: the measured time, times
    (assignments of the busiest rank before / after - 1), over speeds where those differ."""
    spent_seconds: float
    """Time that balancing took: count, plan, replicate, reroute and wait on the slowest rank;
    exchange on the rank that waited least (the others wait for it, as they would at dispatch);
    and the extra time of layers whose busiest rank got more assignments than before."""
    net_seconds: float
    """Saved minus spent; negative where balancing costs more than it saves."""


@dataclass(frozen=True)
class Spread(Documented):
    """Mean, percentiles and maximum of some values; all null where there were none."""

    mean: float | None
    p50: float | None
    """Median."""
    p99: float | None
    """99th percentile, interpolated linearly."""
    max: float | None


@dataclass(frozen=True)
class ImbalanceSnapshot(Documented):
    """Max/mean over ranks, of assignments or times, one value per MoE layer of a batch; 1.0 is
    perfect."""

    before: Spread
    """By routing alone, every token going to its expert's home rank."""
    after: Spread
    """As computed, with replicas."""


@dataclass(frozen=True)
class ReplicaCount(Documented):
    """Replicas placed per layer and batch, over all ranks."""

    mean: float | None
    max: int | None


@dataclass(frozen=True)
class BatchesCount(Documented):
    """Batches (forward passes) by decision."""

    planned: int
    """At least one layer had replicas placed."""
    skipped: dict[str, int]
    """By the reason why every token went to its expert's home rank."""


@dataclass(frozen=True)
class PhaseSnapshot(Documented):
    """Batches of one phase."""

    batches: int
    imbalance: ImbalanceSnapshot | None
    """Null for decode, whose loads are not counted."""


@dataclass(frozen=True)
class LayerSnapshot(Documented):
    """One MoE layer over the window."""

    layer: int
    """Counted from 0 over MoE layers, in the order they run."""
    records: int
    """Batches in which the policy considered this layer's loads."""
    imbalance: ImbalanceSnapshot
    time_imbalance: ImbalanceSnapshot
    floor: float
    """The lowest possible mean of time_imbalance.after, as in the whole balance."""
    replicas: ReplicaCount
    bytes_moved: int
    """Expert weights sent by the ranks of this host."""


@dataclass(frozen=True)
class RankAssignments(Documented):
    """Assignments, (token, expert) pairs, of one rank."""

    before: int
    """By routing alone."""
    after: int
    """As computed."""
    mean: float
    """Of all ranks that share its layers."""
    speed: float = 1.0
    """Mean of the speeds that were planned with; 1.0 is as fast as the fastest rank."""


@dataclass(frozen=True)
class RankSnapshot(Documented):
    """One rank over the window."""

    rank: int
    pid: int | None
    state: str
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool
    """It sends heartbeats and has not failed, stopped or died."""
    heartbeat_age_seconds: float | None
    last_batch_age_seconds: float | None
    """Since its last batch of any size; null before any."""
    assignments: RankAssignments
    bytes_sent: int
    bytes_received: int
    stage_seconds: dict[str, Spread]
    """By stage, over the layers in which it ran; compute is the engine's own part."""
    records: int
    lost: int
    """Records that the rank could not write, since it started."""


@dataclass(frozen=True)
class BalanceSnapshot(Documented):
    """The balance over the window."""

    engine: str
    mode: str
    """tensor: all ranks see the same tokens; data: each its own."""
    policy: str
    """Now in force."""
    num_ranks: int
    """Of the whole group, over all hosts."""
    host_ranks: list[int]
    """The ranks of this host. Assignments, imbalance, batches and replicas cover the whole group;
    health, bytes and times cover these ranks."""
    window_records: int
    """Layers of batches in the window whose loads the policy considered."""
    assignments: int
    """Assignments of these layers, over all ranks."""
    batches: BatchesCount
    phases: dict[str, PhaseSnapshot]
    """prefill; and decode: batches smaller than min_batch_tokens, which are left alone."""
    imbalance: ImbalanceSnapshot
    """Of assignments."""
    time_imbalance: ImbalanceSnapshot
    """Of assignments over speeds, which quota evens out; the same where ranks are equally fast."""
    floor: float
    """The lowest possible mean of time_imbalance.after. Weights move only inside a domain (a host
    or a part of one), so for a layer of a batch it is the largest domain mean of assignments (over
    speeds) over the mean of all ranks. 1.0 where all ranks are one domain."""
    replicas: ReplicaCount
    bytes_moved: int
    """Expert weights sent by the ranks of this host."""
    savings: Savings
    layers: list[LayerSnapshot]
    ranks: list[RankSnapshot]
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RankView:
    """What is known of one rank."""

    rank: int
    header: RingHeader | None  # None: no readable ring
    alive: bool
    heartbeat_age_seconds: float | None
    records: RecordArray  # (n,) its own, at least the fields that RankSnapshot needs
    last_batch_age_seconds: float | None = None  # None: no batch yet
