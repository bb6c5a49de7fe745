"""Physical ids of masters, as tables and for given logical ids."""

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR


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


def master_ids(topk_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Send each assignment (T, K) to its master, int32; ``table`` as ``identity_table`` has it."""
    return table[topk_ids.long().clamp(-1, table.shape[0] - 1)]


def forced_ids(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    speeds: torch.Tensor,
    first_turn: int | torch.Tensor,
) -> torch.Tensor:
    """Take ranks in turn, whatever the router chose: force-balanced routing, wrong answers.

    ``first_turn`` counts the assignments of the ranks before this one, where turns go on: over all
    ranks no load is more than one assignment above the mean. With unequal ``speeds`` (R,) each
    rank's turn comes as often as its speed says.
    """
    chosen = topk_ids >= 0  # padding takes no turn
    turn = (chosen.reshape(-1).cumsum(0) - 1).view(chosen.shape) + first_turn
    num_ranks = speeds.shape[0]
    masters, more = divmod(table.shape[0] - 1, num_ranks)
    total = speeds.sum()
    # A stride by the golden ratio meets every part of 0 to total evenly, however few its steps.
    place = turn * (total * GOLDEN_NUMERATOR // GOLDEN_DENOMINATOR | 1) % total
    by_speed = torch.bucketize(place, speeds.cumsum(0), right=True)
    is_even = (speeds == speeds[0]).all()
    rank = torch.where(is_even, turn % num_ranks, by_speed)
    local = torch.where(is_even, turn // num_ranks, turn) % masters
    return torch.where(chosen, master_ids(rank * masters + rank.clamp(max=more) + local, table), -1)
