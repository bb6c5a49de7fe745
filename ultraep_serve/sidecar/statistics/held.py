"""What is held of a run at one moment: headers, health and records, from which answers are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultraep_serve.costs.model import CostModel
from ultraep_serve.sidecar.memory import OWN_DTYPE, skipped_since
from ultraep_serve.sidecar.statistics.fold import count_batches
from ultraep_serve.sidecar.statistics.selection import RecordSelection
from ultraep_serve.sidecar.statistics.snapshot import RankHealth
from ultraep_serve.telemetry.record import RecordArray
from ultraep_serve.telemetry.ring import RingHeader
from ultraep_serve.types import Decision

__all__ = [
    "Held",
    "NoAnswerError",
    "NoRunError",
    "NotHeldError",
    "RankView",
    "UnbalancedError",
    "merged",
]

_NO_RECORDS: RecordArray = np.empty(0, OWN_DTYPE)


class NoAnswerError(Exception):
    """There is nothing to answer with."""

    status = 503

    @property
    def document(self) -> dict[str, str]:
        """What is answered instead."""
        return {"detail": str(self)}


class NoRunError(NoAnswerError):
    """No ring can be read: the engine has not started or has ended."""


class UnbalancedError(NoRunError):
    """The server runs, but plainly: it could not be balanced, and its operator allowed that."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this server runs without balancing: {reason}")
        self.reason = reason

    @property
    def document(self) -> dict[str, str]:
        """Also for programs."""
        return {"detail": str(self), "status": "unbalanced", "reason": self.reason}


class NotHeldError(NoAnswerError):
    """No records of what was asked for are held."""

    status = 404


@dataclass(frozen=True)
class RankView:
    """What is known of one rank."""

    health: RankHealth
    header: RingHeader | None  # None: no readable ring
    records: RecordArray  # (n,) its own


@dataclass(frozen=True)
class Held:
    """A run whose rings can be read; nothing in it changes later."""

    header: RingHeader  # the first primary rank's, with the policy in force and all stages' layers
    views: Sequence[RankView]  # of the ranks of this host, stage by stage
    primary: RecordArray  # (n,) the primary ranks' records, with loads and figures
    rings: Mapping[int, RecordArray]  # each rank's own records, by its number over all stages
    skipped: RecordArray  # of ``SkippedHistory``
    switched_off: str = ""  # why balancing has switched itself off; empty where it has not
    costs: CostModel | None = None  # by which is decided; None: not measured yet, or not read

    @cached_property
    def headers(self) -> list[RingHeader]:
        """Of the ranks of this host whose rings can be read."""
        return [view.header for view in self.views if view.header]

    @cached_property
    def own(self) -> list[RecordArray]:
        """The own records of ranks 0 to R-1, over all stages; empty for other hosts'."""
        size = self.header.shape.num_ranks
        firsts = sorted({number - number % size for number in self.rings})
        return [
            merged([self.rings.get(first + rank, _NO_RECORDS) for first in firsts])
            for rank in range(size)
        ]

    def batches(self, selection: RecordSelection) -> dict[Decision, int]:
        """Batches of ``selection`` by decision."""
        if selection == RecordSelection():  # the counters go back further than the records held
            counters = self.header.recorded_batches, self.header.skipped_batches
            return dict(zip(Decision, map(sum, zip(*counters, strict=True)), strict=True))
        counts = count_batches(selection.recorded(self.primary))
        skipped = skipped_since(self.skipped, selection.since_ns)
        return {decision: counts.get(decision, 0) + skipped[decision] for decision in Decision}


def merged(records: Sequence[RecordArray]) -> RecordArray:
    """Those of several ranks, oldest first; not to be changed."""
    if len(records) == 1:
        return records[0]
    together = np.concatenate(records)
    return together[np.argsort(together["time_ns"], kind="stable")]
