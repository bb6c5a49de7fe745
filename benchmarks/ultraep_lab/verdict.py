"""Whether balancing pays on a machine, by the cost model: what a replay of ``quota`` ends with."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_lab.replay import PolicyReplay, Replay
from ultraep_serve.costs.model import CostModel, saved_picoseconds, transfer_picoseconds

__all__ = ["LEAST_GAIN", "Verdict", "chosen", "judge", "words"]

LEAST_GAIN = 1.02  # a smaller one is within the error of a prediction
SAME_GAIN = 0.005  # fewer slots are preferred where they gain as much, give or take this
BALANCED = 1.05  # an imbalance this close to the best possible leaves nothing to gain


@dataclass(frozen=True)
class Verdict:
    """What a server would do with ``slots`` per rank; a plan that does not pay is not followed."""

    slots: int
    imbalance_before: float  # busiest rank over mean, mean over layers and batches
    imbalance_after: float
    floor: float  # the best that domains permit
    off_seconds: float  # of a MoE layer, mean over layers and batches
    on_seconds: float
    balanced_share: float  # of layers, whose plans pay
    min_assignments: int | None  # of a batch over all ranks, from which plans pay; None: never

    @property
    def gain(self) -> float:
        """How many times as fast the MoE layers are with balancing."""
        return self.off_seconds / self.on_seconds

    def to_json(self) -> dict[str, Any]:
        """For the report of a replay."""
        return {**asdict(self), "gain": self.gain}


def judge(result: Replay, found: PolicyReplay, costs: CostModel) -> Verdict:
    """Time every layer of ``result`` without balancing and with the plans that ``quota`` made."""
    shape, integer = result.context.shape, costs.integer_costs()
    seconds, after, paid = [], [], 0
    spent = saved = 0  # by all plans that move something, paying or not
    for case, transfer in enumerate(found.transfers):
        mean = result.assignments[case] / shape.num_ranks
        most = round(mean * result.time_imbalance_before[case])
        least = round(mean * found.time_imbalance_after[case])
        gained = saved_picoseconds(most, least, shape, transfer, integer)
        if transfer.busiest_link:
            moved = transfer_picoseconds(transfer, integer)
            spent, saved = spent + moved + integer.plan + integer.exchange, saved + gained + moved
        pays = bool(transfer.busiest_link) and gained > 0
        paid += pays
        kept = found.time_imbalance_after if pays else result.time_imbalance_before
        after.append(kept[case])
        work = max(most * integer.per_assignment, shape.num_masters * integer.per_expert_read)
        off = integer.base + work
        seconds.append((off, off + integer.exchange + (integer.plan - gained if pays else 0)))
    off_seconds, on_seconds = (np.mean(seconds, axis=0) / 1e12).tolist()
    mean_assignments = float(np.mean(result.assignments))
    return Verdict(
        shape.num_replica_slots,
        float(np.mean(result.time_imbalance_before)),
        float(np.mean(after)),
        float(np.mean(result.time_floor)),
        off_seconds,
        on_seconds,
        paid / len(seconds),
        round(mean_assignments * spent / saved) if saved > 0 else None,
    )


def chosen(verdicts: list[Verdict]) -> Verdict:
    """The fewest slots that gain as much as any."""
    best = max(verdict.gain for verdict in verdicts)
    enough = [verdict for verdict in verdicts if verdict.gain >= best - SAME_GAIN]
    return min(enough, key=lambda verdict: verdict.slots)


def words(verdicts: list[Verdict], experts_per_token: int | None) -> list[str]:
    """The verdict in sentences, the settings first."""
    best = chosen(verdicts)
    return [_settings(best, experts_per_token), *map(_figures, verdicts)]


def _settings(best: Verdict, experts_per_token: int | None) -> str:
    if best.gain >= LEAST_GAIN:
        text = f"Turn it on: --policy quota --slots {best.slots}"
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
    return (
        f"{slots}: MoE layers are predicted {verdict.gain:.2f} times as fast "
        f"({1e3 * verdict.off_seconds:.3g} ms -> {1e3 * verdict.on_seconds:.3g} ms), "
        f"{verdict.balanced_share:.0%} of them balanced, "
        f"imbalance {verdict.imbalance_before:.2f} -> {verdict.imbalance_after:.2f}"
    )
