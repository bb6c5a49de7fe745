"""What kernels and their callers agree on, stated once: decisions, plans, row layout, limits.

Needs NumPy and the standard library only. Shape letters: R ranks, E logical experts, S replica
slots per rank.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


class Policy(str, Enum):
    """What to do with a prefill batch."""

    OFF = "off"  # identity mapping
    QUOTA = "quota"  # replicate and reroute by exact load
    IDEAL = "ideal"  # force-balanced routing: wrong answers, for measuring only

    @property
    def code(self) -> int:
        """Stable number of this policy in shared memory and in rows."""
        return list(Policy).index(self)


class Decision(IntEnum):
    """What happened to one MoE layer of one batch, and why."""

    PLANNED = 0  # replicas were placed and tokens rerouted
    FORCED = 1  # force-balanced routing (policy ideal)
    SMALL = 2  # batch below min_batch_tokens
    POLICY_OFF = 3  # policy off at run time
    BALANCED = 4  # imbalance already at or below the threshold
    INCONSISTENT = 5  # a rank reported ids it could not count, or loads differ
    UNPROFITABLE = 6  # the plan would have cost more time than it saves


class Stage(IntEnum):
    """What a layer's time goes to, in order; the index of the times in a record."""

    COUNT = 0
    EXCHANGE = 1
    PLAN = 2
    REPLICATE = 3
    REROUTE = 4
    WAIT = 5
    COMPUTE = 6  # the engine's part: dispatch, expert kernel, combine


@dataclass(frozen=True)
class Plan:
    """Where replicas go and how many assignments each rank computes."""

    slot_expert: IntArray  # (R, S): logical expert that each slot computes, -1 none
    copied: IntArray  # (R, S): the one that is copied into it in this batch, -1 none
    quota: IntArray  # (E, R): assignments of expert e that rank r computes
    share: IntArray  # (E, R): this source rank's part of the quota

    @property
    def slot_load(self) -> IntArray:
        """Assignments that each replica computes, (R, S), 0 where there is none."""
        load = np.zeros(self.slot_expert.shape, np.int32)
        for rank, experts in enumerate(self.slot_expert.tolist()):  # so few that NumPy is slower
            for slot, expert in enumerate(experts):
                if expert >= 0:
                    load[rank, slot] = self.quota[expert, rank]
        return load


class Outcome(NamedTuple):
    """What came of N layers of one batch; but for what is sent and ``own_load`` alike on all ranks.

    What a slot computes, its expert's master does not.
    """

    decision: NDArray[np.integer[Any]]  # (N,) numbers of a Decision
    policy: NDArray[np.integer[Any]]  # (N,) codes of a Policy: rank 0's
    sent: NDArray[np.integer[Any]]  # (N,) experts that this rank sends, to replicas of all ranks
    expert_load: NDArray[np.integer[Any]]  # (N, E) assignments over all ranks
    own_load: NDArray[np.integer[Any]]  # (N, E) assignments of the rank whose tokens were planned
    slot_expert: NDArray[np.integer[Any]]  # (N, R, S) that each slot computes, -1 none
    is_copied: NDArray[np.bool_]  # (N, R, S) whether an expert is copied into it in this batch
    slot_load: NDArray[np.integer[Any]]  # (N, R, S) assignments that each slot computes
    speed: NDArray[np.integer[Any]]  # (N, R) that was planned with


# A rank's row in an exchange: HEADER_WIDTH words, then its load (E,) where ranks see tokens of
# their own. Rank 0's policy counts, of the others everybody's.
HEADER_WIDTH = 8  # words that have no name are reserved and 0
POLICY = 0  # Policy.code that this rank would have
UNKNOWN = 1  # ids that were neither an expert nor padding
CHECKSUM = 2  # of the load where ranks share their tokens
FORGET = 3  # how often this rank has said that its experts may have changed; see ``Choice``
TIME = 4  # what an assignment takes on this rank, in picoseconds; 0: not known
DOUBT = 6  # 1: this rank has found something wrong since it last said so


class Choice(NamedTuple):
    """What a rank writes into its row's header beside what it counted; 0 where it has no say."""

    policy: int = 0
    time: int = 0
    changes: int = 0  # where all ranks' are not what they were, copies that stayed are forgotten


# Speeds of ranks are whole numbers from 1; the fastest rank has this one. A time is a number of
# assignments at this speed.
FULL_SPEED = 1024


# Ranks that measure have whole 32nds of the fastest one's speed, of which the slowest still gets
# work, and is measured. An eighth is no difference: where cores are shared, equally fast ranks
# measure up to a tenth apart for minutes, and equal speeds are what most have.
SPEED_PARTS, LEAST_PARTS, EQUAL_PARTS = 32, 4, 28

FLAG_BYTES = 64  # a flag of the exchange has a cache line of its own

# Reroute: the stride over an expert's places is about this part of them (the golden ratio).
GOLDEN_NUMERATOR, GOLDEN_DENOMINATOR = 618_034, 1_000_000

# Relays, by the rule published with UltraEP (arXiv 2606.04101).
MIN_RELAYED_REPLICAS = 4
MAX_RELAYS = 8
MIN_FAN_OUT_SAVED = 2  # where nothing is known of what a hop costs

# What new copies are weighed by, where residents stay in a layer's slots.
AVERAGE_SHIFT = 3  # of a layer's average load: a batch counts for an eighth
TURN = 5  # of so many batches of a layer, one tries copies for those to come
SPLIT_SWEEPS = 32  # of the split, at most; most loads are at the goal after a few
STEP_SWEEPS = 4  # after each new copy
PROGRESS_SHIFT = 12  # a sweep that gains less than the goal shifted by this is the last
MOST_NEW_COPIES = 6  # that are tried in a batch, one after the other
# batches that a placement is meant for: where this batch wants copies, and in the layer's turn
SOON_BATCHES, LATER_BATCHES = 4, 8


class Prices(NamedTuple):
    """What a layer costs beside its busiest rank's time; both in 1/FULL_SPEED of that."""

    copy: int = 0  # a copy more on the busiest link
    least: int = 0  # computing takes no less: experts are read


_GRAIN = 512
_FIRST_WORK = 1 << 13  # visits spent on few replicas where the load can be balanced
_WORK = 1 << 15  # visits spent in all where it cannot
_RELAX_SWEEPS = 8
_THRIFTY = 3


class Search(NamedTuple):
    """Limits of the planner's search in one domain; CPU and device search alike."""

    grain: int  # times that differ by less than 1/grain of the least one count as equal
    first: int  # attempts of the first wave, all of them at the goal
    limit: int  # attempts of both waves
    sweeps: int  # over all slots, where an attempt ends unbalanced
    thrifty: int  # attempts after both waves, for fewer replicas; each at 1/grain more than before


def search_of(domain_size: int, num_masters: int) -> Search:
    """Limits for domains of ``domain_size`` ranks with ``num_masters`` experts each.

    An attempt visits every rank and every expert of one rank once per copy.
    """
    visits = max(1, domain_size * (domain_size + num_masters))
    first = min(max(_FIRST_WORK // visits, 4), 16)
    limit = min(max(_WORK // visits, 8), 64)
    return Search(_GRAIN, first, limit, _RELAX_SWEEPS, _THRIFTY)
