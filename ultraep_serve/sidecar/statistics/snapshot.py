"""The models of answers, as the HTTP interface documents them: text below a field is its own."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "Answer",
    "BalanceSnapshot",
    "BatchesCount",
    "Document",
    "ImbalanceSnapshot",
    "LayerSnapshot",
    "PhaseSnapshot",
    "RankAssignments",
    "RankHealth",
    "RankSnapshot",
    "RankState",
    "ReplicaCount",
    "Savings",
    "SelfCheckPart",
    "SelfCheckSnapshot",
    "Spread",
    "VerificationCount",
    "VerificationSnapshot",
    "WindowFigures",
]


class Answer(BaseModel):
    """Base of all that the HTTP interface returns."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Document(Answer):
    """An answer that stands alone."""

    schema_version: int = 2


class Savings(Answer):
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


class Spread(Answer):
    """Mean, percentiles and maximum of some values; all null where there were none."""

    mean: float | None
    p50: float | None
    """Median."""
    p99: float | None
    """99th percentile, interpolated linearly."""
    max: float | None


class ImbalanceSnapshot(Answer):
    """Max/mean over ranks, of assignments or times, one value per MoE layer of a batch; 1.0 is
    perfect."""

    before: Spread
    """By routing alone, every token going to its expert's home rank."""
    after: Spread
    """As computed, with replicas."""


class ReplicaCount(Answer):
    """Replicas placed per layer and batch, over all ranks."""

    mean: float | None
    max: int | None


class BatchesCount(Answer):
    """Batches (forward passes) by decision."""

    planned: int
    """At least one layer had replicas placed."""
    skipped: dict[str, int]
    """By the reason why every token went to its expert's home rank."""


class PhaseSnapshot(Answer):
    """Batches of one phase."""

    batches: int
    imbalance: ImbalanceSnapshot | None
    """Null for decode, whose loads are not counted."""


class WindowFigures(Answer):
    """Some layers of the batches of a window, taken together."""

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


class LayerSnapshot(WindowFigures):
    """One MoE layer over the window."""

    layer: int
    """Counted from 0 over MoE layers, in the order they run."""
    records: int
    """Batches in which the policy considered this layer's loads."""


class RankAssignments(Answer):
    """Assignments, (token, expert) pairs, of one rank."""

    before: int
    """By routing alone."""
    after: int
    """As computed."""
    mean: float
    """Of all ranks that share its layers."""
    speed: float = 1.0
    """Mean of the speeds that were planned with; 1.0 is as fast as the fastest rank."""


class RankState(Answer):
    """The current state of one rank."""

    rank: int
    pid: int | None
    state: str
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool
    """It sends heartbeats and has not failed, stopped or died."""
    heartbeat_age_seconds: float | None
    last_batch_age_seconds: float | None
    """Since its last batch of any size; null before any."""
    lost: int
    """Records that it could not write, since it started."""


class RankHealth(RankState):
    """The current state of one rank, and why it is not ready."""

    problem: str
    """Why it is not ready; empty when it is."""
    slot_bytes: int
    """Memory reserved for its replica slots."""
    missed: int
    """Records overwritten or damaged before the sidecar read them."""


class RankSnapshot(RankState):
    """One rank over the window."""

    assignments: RankAssignments
    bytes_sent: int
    bytes_received: int
    stage_seconds: dict[str, Spread]
    """By stage, over the layers in which it ran; compute is the engine's own part."""
    records: int


class SelfCheckPart(Answer):
    """One check of the self-check."""

    name: str
    """kernels, slots, answers or costs."""
    seconds: float
    detail: str
    """What was checked; where it failed, what was found."""
    warning: str
    """What to look at, though it passed; empty where there is nothing."""


class SelfCheckSnapshot(Answer):
    """What the server checked of itself before it took requests."""

    result: Literal["passed", "off", "failed"] | None
    """Null until all ranks of this host have ended it. off: nothing but costs was
    looked at."""
    seconds: float
    """Of all checks together."""
    checks: list[SelfCheckPart]


class VerificationCount(Answer):
    """What one kind of check has seen since the start."""

    layers: int
    """Layers of batches that were checked."""
    failures: int
    """Over the ranks of this host."""


class VerificationSnapshot(Answer):
    """Layers of batches that were checked while they were served, since the start."""

    layers: int
    """As of the kind of check that has seen most."""
    failures: int
    """Of all kinds, over the ranks of this host."""
    by_check: dict[str, VerificationCount]
    """assignments, slots, plans, answers."""
    seconds: float
    """That the checks took on the rank which spent most."""
    switched_off: bool
    """A failure has switched balancing off, and nobody has set a policy since."""


class BalanceSnapshot(Document, WindowFigures):
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
    savings: Savings
    costs: dict[str, int | float] | None
    """The cost model that decides whether moving weights pays, measured at start or given; null
    until it is known. ``--costs`` of replay takes this answer."""
    self_check: SelfCheckSnapshot
    verification: VerificationSnapshot
    layers: list[LayerSnapshot]
    ranks: list[RankSnapshot]
