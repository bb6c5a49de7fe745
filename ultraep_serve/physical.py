"""Physical experts: the ids of masters, and who fills how many slots."""

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.types import IntArray

__all__ = ["experts_sent", "forced_ids", "forced_table", "identity_table", "master_ids"]

_TURNS = 32  # of every master of the fastest rank


def identity_table(num_logical_experts: int, num_ranks: int, num_slots: int) -> NDArray[np.int32]:
    """Physical id of each expert's master, (E + 1,) int32; the last entry serves padding (-1).

    Experts that do not divide evenly go one each to the first ranks, as engines place them.
    """
    masters = np.full(num_ranks, num_logical_experts // num_ranks)
    masters[: num_logical_experts % num_ranks] += 1
    owner = np.repeat(np.arange(num_ranks), masters)
    local = np.arange(num_logical_experts) - (np.cumsum(masters) - masters)[owner]
    table = np.full(num_logical_experts + 1, -1, dtype=np.int32)
    table[:-1] = owner * (masters[0] + num_slots) + local
    return table


def experts_sent(
    rank: int, slot_expert: IntArray, parents: NDArray[np.int64], num_masters: int
) -> int:
    """How many slots ``rank`` fills; ``slot_expert`` and ``parents`` (R, S) as in relay_parents."""
    owner = slot_expert // num_masters
    sender = np.where(parents >= 0, parents // max(1, slot_expert.shape[1]), owner)
    return int(((sender == rank) & (slot_expert >= 0)).sum())


def master_ids(topk_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Every assignment (T, K) to its master, int32, by ``table`` (E + 1,) of ``identity_table``."""
    return table[topk_ids.long().clamp(-1, table.shape[0] - 1)]


def forced_table(identity: NDArray[np.int32], speeds: NDArray[np.integer]) -> NDArray[np.int32]:
    """Masters (N + 1,) that take turns, those of a rank as often as its speed of ``speeds`` (R,).

    The last entry serves padding (-1); with equal speeds it is ``identity`` (E + 1,) of
    ``identity_table``, where E is a multiple of R.
    """
    if (speeds == speeds[0]).all():
        return identity
    masters = identity[:-1].reshape(speeds.size, -1)
    turns = np.maximum(masters.shape[1] * _TURNS * speeds // speeds.max(), 1)
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in turns])
    experts = [
        masters[rank, np.arange(count) % masters.shape[1]] for rank, count in enumerate(turns)
    ]
    return np.append(np.concatenate(experts)[np.argsort(place, kind="stable")], np.int32(-1))


def forced_ids(topk_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Force-balanced routing: masters in turn, whatever the router chose (wrong answers)."""
    chosen = topk_ids >= 0  # padding takes no turn
    turn = (chosen.reshape(-1).cumsum(0) - 1).view(chosen.shape)
    return torch.where(chosen, master_ids(turn % (table.shape[0] - 1), table), -1)
