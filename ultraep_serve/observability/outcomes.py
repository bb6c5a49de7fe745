"""Decisions in the words of the interface: which phase, what was done, why."""

from typing import NamedTuple

from ultraep_serve.types import Decision

__all__ = ["Outcome", "outcome"]


class Outcome(NamedTuple):
    """What happened to a batch or to one MoE layer of it."""

    phase: str  # prefill; decode: batches below min_batch_tokens, whose loads are not counted
    decision: str  # planned, forced (policy ideal) or identity (every token to its master)
    reason: str


_DONE = {
    Decision.PLANNED: ("planned", "imbalanced"),
    Decision.FORCED: ("forced", "measuring"),
}


def outcome(decision: Decision) -> Outcome:
    """The outcome that ``decision`` stands for."""
    phase = "decode" if decision is Decision.SMALL else "prefill"
    return Outcome(phase, *_DONE.get(decision, ("identity", decision.name.lower())))
