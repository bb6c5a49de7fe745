"""Policies side by side, from the batches that each of them served."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.observability import Window
from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.savings import Savings
from ultraep_serve.observability.schema import SCHEMA_VERSION, RecordArray
from ultraep_serve.observability.snapshot import ImbalanceSnapshot, imbalance_snapshot
from ultraep_serve.observability.summary import window_savings
from ultraep_serve.types import Policy, Verb

__all__ = ["PolicyComparison", "PolicyFigures", "compare_policies"]


@dataclass(frozen=True)
class PolicyFigures(Documented):
    """What the batches were like that one policy served."""

    policy: str
    batches: int
    layers: int
    """MoE layers of those batches whose loads were weighed."""
    imbalance: ImbalanceSnapshot
    """before is what policy off would have computed with the same batches."""
    compute_microseconds_per_token: float | None
    """Time of the engine's part of a MoE layer per token of its batch, on the lead rank."""
    savings: Savings


@dataclass(frozen=True)
class PolicyComparison(Documented):
    """The policies that served batches in the window; off leaves no records."""

    policies: list[PolicyFigures]
    schema_version: int = SCHEMA_VERSION


def compare_policies(
    window: Window, lead: RecordArray, ranks: Sequence[RecordArray]
) -> PolicyComparison:
    """Every policy in the lead's and each rank's own records of ``window``."""
    found = []
    for policy in Policy:
        mine = Window(window.since_ns, policy)
        weighed = mine.weighed(lead)
        if len(weighed):
            found.append(_figures(policy, weighed, [mine.recorded(own) for own in ranks]))
    return PolicyComparison(found)


def _figures(policy: Policy, weighed: RecordArray, own: list[RecordArray]) -> PolicyFigures:
    tokens = int(weighed["tokens"].sum(dtype=np.int64))
    compute = float(weighed["verb_ns"][:, Verb.COMPUTE].sum()) / 1e3
    return PolicyFigures(
        policy=policy.value,
        batches=len(np.unique(weighed["batch"])),
        layers=len(weighed),
        imbalance=imbalance_snapshot(weighed),
        compute_microseconds_per_token=compute / tokens if tokens else None,
        savings=window_savings(weighed, own),
    )
