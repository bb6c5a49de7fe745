"""Which copy computes an expert in decode, against brute force and by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultraep_lab.comparators.metro import (
    fewest_reads,
    fixed_ranks,
    metro_ranks,
    reads_of,
    spread_reads,
)


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Activated experts (E,) and copies (E, R), small enough to try everything."""
    num_experts, num_ranks = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks).filter(any)
    copies = draw(st.lists(row, min_size=num_experts, max_size=num_experts))
    active = draw(st.lists(st.booleans(), min_size=num_experts, max_size=num_experts))
    return np.array(active), np.array(copies, np.int32)


def least_by_trying_all(active: np.ndarray, copies: np.ndarray) -> int:
    holders = [np.flatnonzero(copies[expert]) for expert in np.flatnonzero(active)]
    if not holders:
        return 0
    return int(min(np.bincount(ranks).max() for ranks in itertools.product(*holders)))


@settings(max_examples=150, deadline=None)
@given(placements())
def test_the_fewest_reads_are_what_trying_all_finds(case: tuple[np.ndarray, np.ndarray]) -> None:
    active, copies = case
    for choose in (fewest_reads, metro_ranks):
        ranks = choose(active, copies)
        assert np.array_equal(ranks >= 0, active)
        assert (copies[active, ranks[active]] > 0).all()
        reads = reads_of(ranks, active, copies.shape[1])
        assert reads.sum() == active.sum()
        least = least_by_trying_all(active, copies)
        assert reads.max() == least if choose is fewest_reads else reads.max() >= least


def test_a_chain_of_moves_is_found() -> None:
    """Rank 0 reads too many, and what it could give goes to rank 1 alone, which must give first."""
    copies = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0]], np.int32)
    active = np.ones(5, bool)
    assert reads_of(metro_ranks(active, copies), active, 3).tolist() == [3, 2, 0]
    assert reads_of(fewest_reads(active, copies), active, 3).tolist() == [2, 2, 1]


def test_fixed_ranks_even_out_what_is_expected() -> None:
    copies = np.array([[1, 1], [1, 1], [1, 1], [0, 1]], np.int32)
    assert fixed_ranks(np.array([0.9, 0.5, 0.4, 0.1]), copies).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "reads"),
    [
        ([0], [0, 1]),  # expert 1's first copy
        ([0, 1], [1, 1]),  # both copies of it
        ([0, 2], [0, 1]),  # the first again: read once
    ],
)
def test_copies_are_read_in_turn(tokens: list[int], reads: list[int]) -> None:
    copies = np.array([[1, 0], [1, 1]], np.int32)
    topk_ids, turns = np.full((len(tokens), 1), 1), np.array(tokens)[:, None]
    assert spread_reads(topk_ids, turns, copies).tolist() == reads


def test_two_copies_on_a_rank_are_read_twice_where_tokens_are_spread_alone() -> None:
    copies, active = np.array([[2, 0], [0, 1]], np.int32), np.array([True, False])
    topk_ids, turns = np.zeros((4, 1), np.int64), np.arange(4)[:, None]
    assert spread_reads(topk_ids, turns, copies).tolist() == [2, 0]
    assert reads_of(metro_ranks(active, copies), active, 2).tolist() == [1, 0]
