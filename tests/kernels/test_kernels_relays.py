"""relay_parents: who forwards to whom, and when relays are used."""

from collections import Counter

import numpy as np
import pytest
from ultraep_kernels.host.relays import relay_parents

from tests.support.ids import random_slots


def fan_out(replicas: int, ranks: int) -> np.ndarray:
    """(R, 2) slots: expert 0 on ``replicas`` ranks other than its own."""
    slot_expert = np.full((ranks, 2), -1, dtype=np.int32)
    slot_expert[1 : replicas + 1, 0] = 0
    return slot_expert


def sends(slot_expert: np.ndarray, parents: np.ndarray, masters: int) -> Counter[int]:
    num_slots = slot_expert.shape[1]
    filled = slot_expert >= 0
    owner = slot_expert[filled] // masters
    parent = parents[filled]
    return Counter(np.where(parent >= 0, parent // num_slots, owner).tolist())


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
@pytest.mark.parametrize("seed", range(20))
def test_every_replica_is_reached_from_its_master_in_two_steps(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, masters, slots = int(rng.integers(2, 33)), 7, int(rng.integers(1, 4))
    slot_expert = random_slots(ranks, slots, masters, seed)
    parents = relay_parents(slot_expert, masters, mode)
    for (_, _), expert, parent in zip(
        np.ndindex(slot_expert.shape), slot_expert.ravel(), parents.ravel(), strict=True
    ):
        if expert < 0 or parent < 0:
            continue
        assert slot_expert.ravel()[parent] == expert  # a relay holds what it forwards
        assert parents.ravel()[parent] == -1  # and has it from the master
    if mode == "never":
        assert (parents == -1).all()


@pytest.mark.parametrize(
    ("replicas", "relays"), [(3, 3), (4, 2), (8, 2), (9, 3), (16, 4), (63, 7), (70, 8)]
)
def test_about_a_square_root_of_the_replicas_are_relays(replicas: int, relays: int) -> None:
    slot_expert = fan_out(replicas, ranks=replicas + 1)
    parents = relay_parents(slot_expert, 2, "auto")
    by_rank = sends(slot_expert, parents, 2)
    assert by_rank[0] == relays  # what is left for the master
    assert max(by_rank.values()) <= max(relays, -(-replicas // relays))


def test_relays_are_used_or_not_whatever_they_spare_if_the_mode_says_so() -> None:
    assert (relay_parents(fan_out(7, ranks=8), 2, "never", 0) == -1).all()
    assert (relay_parents(fan_out(2, ranks=3), 2, "always", 99) >= 0).any()


def test_a_link_that_receives_more_is_no_faster_by_relays() -> None:
    slot_expert = np.full((9, 4), -1, dtype=np.int32)
    slot_expert[1:5, 0] = 0
    slot_expert[8] = range(10, 14)
    assert (relay_parents(slot_expert, 2, "auto", 1) == -1).all()


def test_a_relay_that_saves_nothing_is_not_used() -> None:
    """Where one rank sends many experts once each, relays could only add steps."""
    slot_expert = np.full((12, 1), -1, dtype=np.int32)
    slot_expert[1:, 0] = np.arange(11) % 11  # eleven experts of rank 0
    assert (relay_parents(slot_expert, 11, "auto") == -1).all()
    assert relay_parents(np.full((4, 0), -1, dtype=np.int32), 2, "always").size == 0
