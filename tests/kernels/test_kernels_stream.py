"""relay_parents, and stream_chunks between ranks that are plain buffers of one process."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.stream import StreamTables, stream_chunks

SIZES = (1000, 37, 4)  # bytes per expert of three tensors
CHUNK = 256


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
    slot_expert = np.full((ranks, slots), -1, dtype=np.int32)
    for rank in range(ranks):
        others = [e for e in range(ranks * masters) if e // masters != rank]
        hot = rng.choice(others[: 2 * slots + 1], size=slots, replace=False)
        slot_expert[rank] = np.where(rng.random(slots) < 0.8, hot, -1)
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


@dataclass
class Ranks:
    """Masters, pools and chunk flags of several ranks in one process."""

    masters: list[list[np.ndarray]]  # by rank and tensor, (L, bytes)
    pools: list[np.ndarray]
    flags: list[np.ndarray]
    slot_expert: np.ndarray
    parents: np.ndarray

    def step(self, rank: int, epoch: int, progress: np.ndarray) -> bool:
        slots = self.slot_expert.shape[1]
        regions = np.concatenate([[0], np.cumsum(slots * np.array(SIZES))[:-1]])
        tables = StreamTables(
            np.array([tensor.ctypes.data for tensor in self.masters[rank]]),
            np.array([pool.ctypes.data for pool in self.pools]),
            regions.astype(np.int64),
            np.array(SIZES, dtype=np.int64),
            CHUNKS,
            np.array([flag.ctypes.data for flag in self.flags]),
            CHUNKS.shape[0],
        )
        masters = self.masters[0][0].shape[0]
        given = self.parents, self.slot_expert, masters, tables, rank, epoch, progress
        return bool(stream_chunks(*given, spins=2))


CHUNKS = np.array(
    [
        (tensor, offset, min(CHUNK, size - offset))
        for tensor, size in enumerate(SIZES)
        for offset in range(0, size, CHUNK)
    ],
    dtype=np.int64,
)


def make_ranks(slot_expert: np.ndarray, parents: np.ndarray, masters: int) -> Ranks:
    rng = np.random.default_rng(0)
    ranks, slots = slot_expert.shape
    return Ranks(
        masters=[
            [rng.integers(0, 256, (masters, size), dtype=np.uint8) for size in SIZES]
            for _ in range(ranks)
        ],
        pools=[np.full(slots * sum(SIZES), 0xFF, dtype=np.uint8) for _ in range(ranks)],
        flags=[np.zeros(slots * CHUNKS.shape[0], dtype=np.int64) for _ in range(ranks)],
        slot_expert=slot_expert,
        parents=parents,
    )


def test_a_relay_does_not_forward_what_has_not_arrived() -> None:
    slot_expert = np.array([[-1], [0], [0]], dtype=np.int32)
    parents = np.array([[-1], [-1], [1]], dtype=np.int64)
    ranks = make_ranks(slot_expert, parents, masters=2)
    progress = np.zeros(slot_expert.shape, dtype=np.int64)
    assert not ranks.step(1, 1, progress)
    assert not ranks.flags[2].any()
    ranks.flags[1][0] = 1  # its first chunk is there, the others are not
    assert not ranks.step(1, 1, progress)
    assert ranks.flags[2].tolist() == [1, *[0] * (CHUNKS.shape[0] - 1)]
    assert not ranks.step(1, 2, np.zeros_like(progress))  # a flag of the epoch before is no flag
    assert ranks.flags[2][0] == 1
