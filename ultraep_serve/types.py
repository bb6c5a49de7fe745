"""The nouns: what the rooms pass to each other.

Shape letters: R ranks, E logical experts, S replica slots per rank, L = E / R masters per rank,
T tokens of a batch, K experts per token.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Decision", "ExpertShape", "IntArray", "Plan", "Policy", "Verb", "imbalance"]

IntArray = NDArray[np.int32]


class Policy(str, Enum):
    """What to do with a prefill batch."""

    OFF = "off"  # identity mapping
    QUOTA = "quota"  # replicate and reroute by exact load
    IDEAL = "ideal"  # force-balanced routing: wrong answers, for measuring only
    EPLB = "eplb"  # replicate by past load, split evenly: for comparison

    @property
    def code(self) -> int:
        """Stable number of this policy in shared memory."""
        return list(Policy).index(self)


class Decision(IntEnum):
    """What happened to one MoE layer of one batch, and why."""

    PLANNED = 0  # replicas were placed and tokens rerouted
    FORCED = 1  # force-balanced routing (policy ideal)
    SMALL = 2  # batch below min_batch_tokens
    POLICY_OFF = 3  # policy off at run time
    BALANCED = 4  # imbalance already at or below the threshold
    DOUBT = 5  # a rank reported ids it could not count
    UNPROFITABLE = 6  # the plan would not have improved the busiest rank


class Verb(IntEnum):
    """What a layer's time goes to, in order; the index of the times in a record."""

    COUNT = 0
    EXCHANGE = 1
    PLAN = 2
    REPLICATE = 3
    REROUTE = 4
    AWAIT = 5
    COMPUTE = 6  # the engine's part: dispatch, expert kernel, combine


@dataclass(frozen=True)
class ExpertShape:
    """The sizes that every plan depends on."""

    num_ranks: int  # R
    num_logical_experts: int  # E, a multiple of R
    num_replica_slots: int  # S
    num_micro_batches: int = 1  # of a forward pass, that overlap: each has S slots of its own

    @property
    def num_masters(self) -> int:
        """L: home copies per rank."""
        return self.num_logical_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """Slots per rank, those of all micro-batches."""
        return self.num_micro_batches * self.num_replica_slots

    @property
    def num_local(self) -> int:
        """Physical experts per rank: L + S, with overlapping micro-batches more slots."""
        return self.num_masters + self.num_slots


@dataclass(frozen=True)
class Plan:
    """Where replicas go and how many assignments each rank computes."""

    slot_expert: IntArray  # (R, S): logical expert in each slot, -1 empty
    quota: IntArray  # (E, R): assignments of expert e that rank r computes
    share: IntArray  # (E, R): this source rank's part of the quota


def imbalance(rank_load: NDArray[np.integer]) -> float:
    """Max/mean of assignments over ranks, ``rank_load`` (R,); 1.0 is perfect, also when empty."""
    total = int(rank_load.sum())
    return float(rank_load.max()) * rank_load.size / total if total else 1.0
