"""Who sends what, on the device against the CPU."""

import numpy as np
import torch
from ultraep_kernels.device.relays import plan_sends
from ultraep_kernels.host.relays import relay_parents

from tests.support.bench import Bench
from tests.support.cases import cases
from tests.support.ids import random_slots
from tests.support.kernel_checks import require_equal


def tasks_of(slot_expert: np.ndarray, parents: np.ndarray, masters: int, rank: int) -> list:
    """[direct, relayed] slots that ``rank`` fills, from its own place on."""
    num_ranks, num_slots = slot_expert.shape
    tasks: list[list[int]] = [[], []]
    for step in range(num_ranks * num_slots):
        target, slot = (rank + step // num_slots) % num_ranks, step % num_slots
        parent, expert = parents[target, slot], slot_expert[target, slot]
        if expert >= 0 and (parent // num_slots if parent >= 0 else expert // masters) == rank:
            tasks[int(parent >= 0)].append(target * num_slots + slot)
    return tasks


@cases("mode", ["auto", "always", "never"])
@cases("shape", [(4, 1), (8, 2), (9, 2), (33, 3), (72, 4)])
def test_sends_equal_their_twin(bench: Bench, shape: tuple[int, int], mode: str) -> None:
    num_ranks, num_slots = shape
    masters = num_slots + 3
    slot_expert = random_slots(num_ranks, num_slots, masters, seed=num_ranks)
    expected = relay_parents(slot_expert, masters, mode)
    on_device = torch.from_numpy(slot_expert).to(bench.device)
    for rank in (0, 1, num_ranks - 1):
        sends = plan_sends(on_device, masters, mode, num_ranks, rank)
        require_equal(sends.parents, expected, "parents")
        for kind, tasks in enumerate(tasks_of(slot_expert, expected, masters, rank)):
            row = sends.tasks[kind].tolist()
            assert row[0] == len(tasks)
            assert row[1 : 1 + row[0]] == tasks


@cases("min_saved, copies", [(1, 3), (3, 3), (4, 6)])
def test_relays_at_eight_ranks_where_they_spare_enough(
    bench: Bench, min_saved: int, copies: int
) -> None:
    """A rank that would send 6 copies sends 3, unless a hop costs more than that spares."""
    slot_expert = np.array([[-1], [0], [0], [0], [0], [0], [1], [-1]], np.int32)
    on_device = torch.from_numpy(slot_expert).to(bench.device)
    sends = plan_sends(on_device, 16, "auto", 8, 0, min_saved)
    require_equal(sends.parents, relay_parents(slot_expert, 16, "auto", min_saved), "parents")
    assert sends.tasks[:, 0].tolist() == [copies, 0]
