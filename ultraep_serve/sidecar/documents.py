"""The answers of the HTTP interface, and what they mean: text below a field is its own."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ultraep_serve.types import Policy

__all__ = [
    "Answer",
    "BalanceSnapshot",
    "BatchList",
    "BatchSnapshot",
    "BatchesCount",
    "ConfigAnswer",
    "Heatmap",
    "History",
    "ImbalanceSnapshot",
    "LayerDetail",
    "LayerPlan",
    "LayerSnapshot",
    "PolicyAnswer",
    "PolicyRequest",
    "RankAssignments",
    "RankSnapshot",
    "RankState",
    "Readiness",
    "Replica",
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

    schema_version: int = 3


class Readiness(Document):
    """Whether the server of this host is as its operator wants it."""

    ready: bool
    status: Literal["ready", "not ready", "unbalanced"]
    """unbalanced: it could not be balanced, and runs all the same, as its operator chose with
    on_unsupported=off; or balancing has switched itself off, because a sample failed."""
    reasons: dict[str, str]
    """Why it is not ready or not balanced, by rank; under ``run`` where no rank is known."""


class ConfigAnswer(Document):
    """The configuration in force."""

    version: str
    """Of ultraep_serve."""
    policy: str | None
    """Now in force; null where unknown."""
    policies: list[str]
    """Policies that may be put in force."""
    control_open: bool
    """Whether there is a token that gives access to control."""
    config: dict[str, Any] | None
    """The settings at start, without secrets; null where there are none."""


class PolicyRequest(BaseModel):
    """The policy to put in force."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy


class PolicyAnswer(Document):
    """The policy put in force, and how many times one was set."""

    policy: Policy
    sequence: int


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

    mean: float | None = None
    p50: float | None = None
    """Median."""
    p99: float | None = None
    """99th percentile, interpolated linearly."""
    max: float | None = None


class ImbalanceSnapshot(Answer):
    """Max/mean over ranks, of assignments or times, one value per MoE layer of a batch; 1.0 is
    perfect."""

    before: Spread
    """By routing alone, every token going to its expert's home rank."""
    after: Spread
    """As computed, with replicas."""


class ReplicaCount(Answer):
    """Replicas that compute, per layer and batch, over all ranks."""

    mean: float | None
    max: int | None
    new: float | None
    """Mean of experts that were copied in the batch, a few for batches to come only; replicas that
    were not stayed from batches before."""


class BatchesCount(Answer):
    """Batches (forward passes) since the engine started, by decision."""

    planned: int
    """At least one layer had replicas placed."""
    skipped: dict[str, int]
    """By the reason why every token went to its expert's home rank. small: decode, batches below
    min_batch_tokens, which are left alone."""


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


class LayerSnapshot(WindowFigures):
    """One MoE layer over the window."""

    layer: int
    """Counted from 0 over MoE layers, in the order they run."""
    records: int
    """Batches in which the policy considered this layer's loads."""


class Replica(Answer):
    """A copy of an expert in another rank's slot."""

    expert: int
    """Logical expert."""
    home_rank: int
    """Rank of its master."""
    rank: int
    """Rank that holds the copy."""
    slot: int
    """Slot of that rank."""
    assignments: int
    """Assignments that the copy computes instead of the master (its quota)."""
    bytes: int
    """Weights copied into the slot."""


class LayerPlan(Answer):
    """How a layer of one batch was balanced."""

    batch: int
    """Number of the forward pass since the engine started, the same on every rank."""
    time_ns: int
    """Unix time at its end."""
    policy: str
    """Policy in force."""
    tokens: int
    """Tokens of the batch, over all ranks."""
    decision: str
    """planned, forced, or identity: every token went to its expert's home rank."""
    reason: str
    """imbalanced, measuring, policy_off, balanced, inconsistent or unprofitable."""
    imbalance_before: float
    """Max/mean of assignments over ranks, by routing alone."""
    imbalance_after: float
    """Max/mean of assignments over ranks, as computed."""
    time_imbalance_before: float
    """Of assignments over the speeds of ranks, by routing alone."""
    time_imbalance_after: float
    """Of assignments over the speeds of ranks, as computed."""
    avoided_seconds: float
    """Estimated time that balancing took off; negative: the layer took longer."""
    ranks: list[RankAssignments]
    """Assignments by rank."""
    expert_assignments: list[int]
    """Assignments by logical expert; expert e lives on rank e // (experts / ranks)."""
    replicas: list[Replica]
    """Copies of experts in slots."""
    stage_seconds: list[dict[str, float]]
    """Time in each stage, by rank; empty for a rank without this record."""


class LayerDetail(Document, LayerSnapshot):
    """One MoE layer over the window, and its last plan."""

    ranks: list[RankAssignments]
    """Of every rank of the whole group, summed over the window."""
    last: LayerPlan
    """In the newest batch."""


class Heatmap(Document):
    """Load of the ranks in each MoE layer over the window, those of each batch from the busiest
    rank on, whichever it is: the first of a layer is its mean imbalance."""

    layers: list[int]
    """The layer of each row."""
    before: list[list[float]]
    """Per layer, from the busiest rank on: assignments over the mean of the ranks, by routing
    alone, as the mean over batches."""
    after: list[list[float]]
    """The same, as computed."""


class History(Document):
    """Imbalance over the last 15 minutes, one entry per step; null where no load was looked at."""

    step_seconds: int
    """Seconds per entry."""
    time_seconds: list[int]
    """Unix time at which each step begins."""
    before_mean: list[float | None]
    """Mean over layers and batches of max/mean of assignments over ranks, by routing alone."""
    before_max: list[float | None]
    """The maximum of the same."""
    after_mean: list[float | None]
    """Mean over layers and batches of max/mean of assignments over ranks, as computed."""
    after_max: list[float | None]
    """The maximum of the same."""


class BatchSnapshot(Answer):
    """One batch: its layers taken together."""

    batch: int
    """Number of the forward pass since the engine started, the same on every rank."""
    time_ns: int
    """Unix time at its end."""
    policy: str
    """Policy in force."""
    tokens: int
    """Tokens of the batch, over all ranks."""
    layers: dict[str, int]
    """Its MoE layers by decision."""
    imbalance: ImbalanceSnapshot
    """Over its layers."""
    time_imbalance: ImbalanceSnapshot
    """Of assignments over speeds; the same where ranks are equally fast."""
    replicas: int
    """Replicas that compute, over all layers and ranks."""
    new_replicas: int
    """Experts that were copied in the batch, a few for batches to come only."""
    bytes_moved: int
    """Expert weights sent by the ranks of this host."""
    avoided_seconds: float
    """Estimated time that balancing took off its layers; negative where they took longer."""


class BatchList(Document):
    """Batches, newest first."""

    batches: list[BatchSnapshot]
    next_before: int | None = None
    """Value of the parameter ``before`` for the next page; null on the last page."""


class RankState(Answer):
    """The current state of one rank."""

    rank: int
    pid: int | None = None
    state: str = "missing"
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool = False
    """It sends heartbeats and has not failed, stopped or died."""
    heartbeat_age_seconds: float | None = None
    last_batch_age_seconds: float | None = None
    """Since its last batch of any size; null before any."""
    lost: int = 0
    """Records that it could not write, since it started."""
    missed: int = 0
    """Records overwritten or damaged before the sidecar read them."""


class RankSnapshot(RankState):
    """One rank over the window."""

    assignments: RankAssignments
    bytes_sent: int
    bytes_received: int
    stage_seconds: dict[str, float]
    """Mean time by stage, over the layers in which it ran; compute is the engine's own part."""


class SelfCheckPart(Answer):
    """One check of the self-check."""

    name: str
    """kernels or copies; settings, where these leave nothing to balance."""
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
    num_layers: int
    """MoE layers."""
    num_experts: int
    """Logical experts of a layer."""
    num_slots: int
    """Replica slots of a rank."""
    host_ranks: list[int]
    """The ranks of this host. Assignments, imbalance, batches and replicas cover the whole group;
    health, bytes and times cover these ranks."""
    window_records: int
    """Layers of batches in the window whose loads the policy considered."""
    batches: BatchesCount
    savings: Savings
    costs: dict[str, int | float] | None
    """The cost model that decides whether moving weights pays, measured at start or given; null
    until it is known."""
    self_check: SelfCheckSnapshot
    verification: VerificationSnapshot
    layers: list[LayerSnapshot]
    ranks: list[RankSnapshot]
