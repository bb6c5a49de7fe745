"""Whether balancing pays on a machine, by the cost model: what a replay ends with.

A server makes ``quota``'s plans where its layers share slots, and ``staying``'s where each has its
own.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_lab.replay import Replay
from ultraep_serve.costs.model import CostModel

SLOT_MEMORY = {"quota": "shared", "staying": "per_layer"}  # of the policies that servers run

LEAST_GAIN = 1.02  # a smaller one is within the error of a prediction
SAME_GAIN = 0.005  # less memory is preferred where it gains as much, give or take this
BALANCED = 1.05  # an imbalance this close to the best possible leaves nothing to gain


@dataclass(frozen=True)
class Verdict:
    """What a server would do; with shared slots a plan that does not pay is not followed.

    Where copies stay the planner weighs batches to come, and each of its plans is followed.
    """

    slots: int  # per rank
    slot_memory: str
    imbalance_before: float  # busiest rank over mean, mean over layers and batches
    imbalance_after: float
    floor: float  # the best that domains permit
    off_seconds: float  # of a MoE layer, mean over layers and batches
    on_seconds: float
    balanced_share: float  # of layers, whose plans pay
    copies: float  # of experts in a layer, mean over layers and batches
    min_assignments: int | None  # of a batch over all ranks, from which plans pay; None: never

    @property
    def gain(self) -> float:
        """How many times as fast the MoE layers are with balancing."""
        return self.off_seconds / self.on_seconds

    def to_json(self) -> dict[str, Any]:
        """For the report of a replay."""
        return {**asdict(self), "gain": self.gain}


def judge(result: Replay, policy: str, costs: CostModel) -> Verdict:
    """Time every layer of ``result`` without balancing and with the plans of ``policy``."""
    shape, integer, found = result.context.shape, costs.integer_costs(), result.policies[policy]
    stay = SLOT_MEMORY[policy] == "per_layer"
    seconds, after, copies, paid = [], [], [], 0
    spent = saved = 0  # by all plans that may be followed, paying or not
    for case, transfer in enumerate(found.transfers):
        mean = result.assignments[case] / shape.num_ranks
        most, least = (
            round(mean * imbalances[case])
            for imbalances in (result.time_imbalance_before, found.time_imbalance_after)
        )
        held = shape.num_masters + found.slots_needed[case]
        work = max(most * integer.per_assignment, shape.num_masters * integer.per_expert_read)
        moved = transfer.busiest_link * integer.per_expert_sent
        gained = work - moved - max(least * integer.per_assignment, held * integer.per_expert_read)
        if stay or transfer.busiest_link:
            spent, saved = spent + moved + integer.plan + integer.exchange, saved + gained + moved
        is_followed = stay or (transfer.busiest_link > 0 and gained > 0)
        paid += gained > 0
        kept = found.time_imbalance_after if is_followed else result.time_imbalance_before
        after.append(kept[case])
        copies.append(found.copies[case] if is_followed else 0)
        off = integer.base + work
        seconds.append((off, off + integer.exchange + is_followed * (integer.plan - gained)))
    off_seconds, on_seconds = (np.mean(seconds, axis=0) / 1e12).tolist()
    mean_assignments = float(np.mean(result.assignments))
    return Verdict(
        shape.num_replica_slots,
        SLOT_MEMORY[policy],
        float(np.mean(result.time_imbalance_before)),
        float(np.mean(after)),
        float(np.mean(result.time_floor)),
        off_seconds,
        on_seconds,
        paid / len(seconds),
        float(np.mean(copies)),
        round(mean_assignments * spent / saved) if saved > 0 else None,
    )


def chosen(verdicts: list[Verdict]) -> Verdict:
    """The least memory that gains as much as any."""
    best = max(verdict.gain for verdict in verdicts)
    enough = [verdict for verdict in verdicts if verdict.gain >= best - SAME_GAIN]
    return min(enough, key=lambda verdict: (verdict.slot_memory != "shared", verdict.slots))


def words(verdicts: list[Verdict], experts_per_token: int | None) -> list[str]:
    """The verdict in sentences, the settings first."""
    best = chosen(verdicts)
    return [_settings(best, experts_per_token), *map(_figures, verdicts)]


def _settings(best: Verdict, experts_per_token: int | None) -> str:
    if best.gain >= LEAST_GAIN:
        text = f"Turn it on: --slots {best.slots} --slot-memory {best.slot_memory}"
        if best.min_assignments is not None and experts_per_token is not None:
            text += f" --min-batch-tokens {-(-best.min_assignments // experts_per_token)}"
        return text
    if best.imbalance_before < BALANCED * best.floor:
        return f"Leave it off: an imbalance of {best.imbalance_before:.2f} leaves little to gain."
    text = "Leave it off: in batches of this size moving experts takes as long as it saves"
    if best.min_assignments is not None and experts_per_token is not None:
        text += f"; from about {best.min_assignments // experts_per_token} tokens on it pays"
    return f"{text}."


def _figures(verdict: Verdict) -> str:
    slots = f"{verdict.slots} slot{'s' * (verdict.slots != 1)}"
    slots += {"shared": " for all layers", "per_layer": " per layer"}[verdict.slot_memory]
    return (
        f"{slots}: MoE layers are predicted {verdict.gain:.2f} times as fast "
        f"({1e3 * verdict.off_seconds:.3g} ms -> {1e3 * verdict.on_seconds:.3g} ms), "
        f"{verdict.balanced_share:.0%} of them balanced, {verdict.copies:.1f} copies in each, "
        f"imbalance {verdict.imbalance_before:.2f} -> {verdict.imbalance_after:.2f}"
    )
