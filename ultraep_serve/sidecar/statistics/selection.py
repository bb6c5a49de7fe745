"""Which records an answer covers, and the names of decisions in the interface."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.types import Decision, Policy

__all__ = ["DecisionNames", "RecordSelection", "decision_names"]

# Decisions for layers whose loads the policy considered; the others never reached the planner.
_CONSIDERED: dict[Policy, tuple[Decision, ...]] = {
    Policy.QUOTA: (Decision.PLANNED, Decision.BALANCED, Decision.UNPROFITABLE),
    Policy.OFF: (Decision.POLICY_OFF,),
    Policy.IDEAL: (Decision.FORCED,),
}


def _considered_by(policy: Policy) -> NDArray[np.bool_]:
    """Whether a record counts, by its policy and decision, (256, 256)."""
    table = np.zeros((256, 256), dtype=bool)
    table[policy.code, [int(decision) for decision in _CONSIDERED[policy]]] = True
    return table


_TABLES = {None: _considered_by(Policy.QUOTA)} | {
    policy: _considered_by(policy) for policy in Policy
}


@dataclass(frozen=True)
class RecordSelection:
    """Which records count, by time and policy."""

    since_ns: int = 0  # wall clock, inclusive
    policy: Policy | None = None  # None: any; for imbalance any that gives correct answers

    def recorded(self, records: RecordArray) -> RecordArray:
        """Records selected, whatever was decided."""
        if self == RecordSelection():
            return records
        keep = records["time_ns"] >= np.uint64(self.since_ns)
        if self.policy is not None:
            keep &= records["policy"] == self.policy.code
        return _kept(records, keep)

    def considered(self, records: RecordArray) -> RecordArray:
        """Records selected whose loads the policy considered: those with an imbalance."""
        records = self.recorded(records)
        return _kept(records, _TABLES[self.policy][records["policy"], records["decision"]])


def _kept(records: RecordArray, keep: NDArray[np.bool_]) -> RecordArray:
    """``records[keep]``, without a copy where only the oldest are dropped."""
    first = int(keep.argmax()) if keep.any() else len(keep)
    return records[first:] if keep[first:].all() else records[keep]


class DecisionNames(NamedTuple):
    """What happened to a batch or to one MoE layer of it, in the words of the interface."""

    phase: str  # prefill; decode: batches below min_batch_tokens, whose loads are not counted
    decision: str  # planned, forced (policy ideal) or identity (every token to its master)
    reason: str


_DONE = {
    Decision.PLANNED: ("planned", "imbalanced"),
    Decision.FORCED: ("forced", "measuring"),
}


def decision_names(decision: Decision) -> DecisionNames:
    """The names that ``decision`` stands for."""
    phase = "decode" if decision is Decision.SMALL else "prefill"
    return DecisionNames(phase, *_DONE.get(decision, ("identity", decision.name.lower())))
