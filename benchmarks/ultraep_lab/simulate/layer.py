"""One layer of one batch on ranks and links of given speeds -> its plan, and what comes of it.

Slow ranks are known to the planner, as in a server. Links are not: a slow one makes the transfer
longer, and where a dead one cuts off a copy, directly or behind a relay, its assignments go back to
the expert's home rank.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.advise.advice import Setting
from ultraep_lab.advise.predict import layer_seconds
from ultraep_lab.advise.recommend import named_slots
from ultraep_serve.costs.model import experts_moved, saved_picoseconds, transfer_of
from ultraep_serve.costs.relays import chosen_parents
from ultraep_serve.plan.checks import imbalance_floor
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import IntArray, Plan, imbalance

__all__ = ["FIGURES", "GroupMachine", "Variant", "follow", "judge"]

# Of one layer of one batch, in the order that ``judge`` returns them.
FIGURES = (
    "before",  # imbalance of counts, every expert on its master
    "planned",  # if every copy arrives
    "after",  # without those that dead links cut off
    "floor",  # the least that any plan inside domains can reach
    "time_before",  # the same of times
    "time_planned",
    "time_after",
    "time_floor",
    "plan_seconds",  # measured on this machine
    "copies",  # planned
    "lost_copies",
    "returned",  # assignments of lost copies, of all
    "link_bytes",  # sent or received by the rank that sends or receives most
    "off_seconds",  # predicted, of the layer
    "seconds",  # as served: a plan that does not pay is not followed
    "is_followed",  # 1 where it is
)
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Variant:
    """What is compared; the settings of a server."""

    setting: Setting
    slots: int
    relay: str

    @property
    def context(self) -> PlanContext:
        """What plans depend on, where all ranks are equally fast."""
        return self.setting.context(self.slots)

    @property
    def name(self) -> str:
        """What distinguishes it, in words."""
        sizes = f"EP{self.setting.num_ranks}, domains of {self.context.domain_size}"
        return f"{sizes}, {named_slots(self.slots)}, relays {self.relay}"


@dataclass(frozen=True)
class GroupMachine:
    """The ranks and links of one group."""

    speeds: Counts  # (R,), as planned by
    fastest: float  # speed of the fastest rank, 1 where it is not slow
    link_speeds: NDArray[np.float64]  # (R,), 1 where a rank's link is not slow
    alive: NDArray[np.bool_]  # (R, R): whether a rank can send weights to another


def judge(variant: Variant, machine: GroupMachine, loads: Counts) -> tuple[float, ...]:
    """FIGURES of one layer of one batch, ``loads`` (R, E)."""
    setting, by_count = variant.setting, variant.context
    costs = setting.estimate.costs.integer_costs()
    context, masters = replace(by_count, speeds=machine.speeds), by_count.shape.num_masters
    begun = time.perf_counter()
    plan = plan_quota(loads, context, 0)
    plan_seconds = time.perf_counter() - begun
    parents = chosen_parents(plan.slot_expert, masters, variant.relay, costs)
    followed = follow(plan, parents, machine.alive, masters)
    before = context.rank_loads(loads)
    planned, after = (one.quota.sum(0, dtype=np.int64) for one in (plan, followed))
    of_counts = [imbalance(load) for load in (before, planned, after)]
    of_counts.append(imbalance_floor(loads, by_count))
    of_times = of_counts
    if not context.is_equally_fast:
        of_times = [imbalance(load, context.speeds) for load in (before, planned, after)]
        of_times.append(imbalance_floor(loads, context))
    # As a server decides, which knows neither how links are nor, at that moment, of relays.
    busiest, least = (context.busiest_time(load) for load in (before, planned))
    expected = transfer_of(plan.slot_expert, masters)
    pays = saved_picoseconds(busiest, least, context.shape, expected, costs) > 0
    copies, arrived = (int((one.slot_expert >= 0).sum()) for one in (plan, followed))
    lost = copies - arrived
    moved = transfer_of(followed.slot_expert, masters, parents).busiest_link
    returned = int(abs(followed.quota.astype(np.int64) - plan.quota).sum()) // 2 if lost else 0
    return (
        *of_counts,
        *of_times,
        plan_seconds,
        float(copies),
        float(lost),
        returned / max(1, int(before.sum())),
        float(moved * setting.estimate.costs.bytes_per_expert),
        _seconds(setting, machine, context, before, exchanged=False),
        _seconds(setting, machine, context, after, followed.slot_expert, parents)
        if pays
        else _seconds(setting, machine, context, before),
        float(pays),
    )


def _seconds(
    setting: Setting,
    machine: GroupMachine,
    context: PlanContext,
    rank_load: Counts,
    slot_expert: IntArray | None = None,
    parents: Counts | None = None,
    *,
    exchanged: bool = True,
) -> float:
    """Predicted time of the layer with ``rank_load`` (R,), moving what ``slot_expert`` holds."""
    costs, masters = setting.estimate.costs, context.shape.num_masters
    busiest = context.busiest_time(rank_load) / machine.fastest
    tokens = float(rank_load.sum()) / setting.shape.experts_per_token / rank_load.size
    if slot_expert is None:
        return layer_seconds(costs, busiest, tokens, masters, exchanged=exchanged)
    transfer = transfer_of(slot_expert, masters, parents)
    links = np.maximum(*experts_moved(slot_expert, masters, parents))
    return layer_seconds(
        costs,
        busiest,
        tokens,
        masters + transfer.busiest_receiver,
        transfer=transfer,
        link_experts=float((links / machine.link_speeds).max()),
        exchanged=exchanged,
    )


def follow(plan: Plan, parents: Counts, alive: NDArray[np.bool_], num_masters: int) -> Plan:
    """The plan without the copies that cannot arrive; what they would compute goes home.

    Args:
        plan: of one layer; its ``share`` is left as it is.
        parents: (R, S) who sends each slot its weights, as ``relay_parents``: relays have theirs
            from masters.
        alive: (R, R), whether a rank can send weights to another.
        num_masters: L.
    """
    if alive.all():
        return plan
    slot_expert, quota = plan.slot_expert.copy(), plan.quota.copy()
    ranks, slots = np.nonzero(slot_expert >= 0)
    experts, parent = slot_expert[ranks, slots], parents[ranks, slots]
    homes = experts // num_masters
    is_direct = parent < 0
    arrives = alive[np.where(is_direct, homes, parent // max(1, slot_expert.shape[1])), ranks]
    has_arrived = np.zeros(slot_expert.shape, bool)
    has_arrived[ranks, slots] = arrives
    arrives &= is_direct | has_arrived.ravel()[parent]
    experts, homes, ranks, slots = (part[~arrives] for part in (experts, homes, ranks, slots))
    np.add.at(quota, (experts, homes), quota[experts, ranks])
    quota[experts, ranks] = 0
    slot_expert[ranks, slots] = -1
    return replace(plan, slot_expert=slot_expert, quota=quota)
