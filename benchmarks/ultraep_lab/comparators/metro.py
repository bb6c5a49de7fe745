"""METRO: in decode all tokens of an expert go to one of its copies, so that ranks read few experts.

Where a batch is small, a rank's time is that of reading the weights of its *activated* experts,
those that get a token. Splitting an expert's tokens among its copies, as is right in prefill, has
several ranks read it.

Source: "Efficient MoE Serving in the Memory-Bound Regime: Balance Activated Experts, Not Tokens"
(Yu et al., arXiv 2512.09277), algorithm 1, and the optimum of its section IV-B. There experts
choose in parallel, hence in any order; here in the order of their numbers.

These choose copies for one batch and move no weights, and a batch of decode is no batch of a
replay, so they are no policies: ``benchmarks/decode.py`` compares them.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.types import IntArray

__all__ = ["fewest_reads", "fixed_ranks", "metro_ranks", "reads_of", "spread_reads"]

Integers = NDArray[np.integer]


def metro_ranks(active: NDArray[np.bool_], copies: IntArray) -> IntArray:
    """Each activated expert in turn chooses the rank with a copy that has fewest so far.

    Args:
        active: (E,), whether expert e gets a token.
        copies: (E, R), how many copies of expert e rank r holds; each expert has one somewhere.

    Returns:
        int32 (E,): the rank that computes expert e, -1 where it gets no token.
    """
    return _in_turn(np.flatnonzero(active), np.ones(active.size), copies)


def fixed_ranks(chance: NDArray[np.float64], copies: IntArray) -> IntArray:
    """One rank for every expert, int32 (E,), chosen when copies are placed: it needs no exchange.

    Likely experts choose first, each the rank with a copy that is expected to read least so far.

    Args:
        chance: (E,), how likely expert e gets a token of a batch.
        copies: (E, R), as above.
    """
    return _in_turn(np.argsort(-chance, kind="stable"), chance, copies)


def fewest_reads(active: NDArray[np.bool_], copies: IntArray) -> IntArray:
    """Ranks as ``metro_ranks`` has them, for which no rank could read fewer at most.

    From METRO's choice experts are moved along a chain of ranks, from one that reads most to one
    that reads at least two fewer, until there is no such chain. Then the ranks that can be reached
    hold all copies of the experts that they compute, and read at least one less than the most: so
    somebody has to read the most.
    """
    ranks = metro_ranks(active, copies)
    holders = _holders(copies)
    while _relieved(ranks, holders, copies.shape[1]):
        pass
    return ranks


def reads_of(ranks: IntArray, active: NDArray[np.bool_], num_ranks: int) -> NDArray[np.int64]:
    """How many experts each rank reads, (R,), where ``ranks`` (E,) compute the ``active`` ones."""
    return np.bincount(ranks[active], minlength=num_ranks)


def spread_reads(topk_ids: Integers, turns: Integers, copies: IntArray) -> NDArray[np.int64]:
    """How many copies each rank reads, (R,), where tokens go to an expert's copies by turns.

    Args:
        topk_ids: (tokens, K), logical experts.
        turns: (tokens, 1) or (tokens, K): modulo an expert's number of copies it says which. So
            vLLM does with a hash of the token's number, SGLang with random numbers.
        copies: (E, R), as above; two copies on a rank are read one by one.
    """
    num_experts, num_ranks = copies.shape
    place = (np.arange(num_ranks) + np.arange(num_experts)[:, None]) % num_ranks
    in_order = np.take_along_axis(copies, place, 1)  # not all first copies on the first ranks
    rank_of_copy = np.repeat(place.ravel(), in_order.ravel())
    count = copies.sum(1)
    chosen = (count.cumsum() - count)[topk_ids] + turns % count[topk_ids]
    return np.bincount(rank_of_copy[np.unique(chosen)], minlength=num_ranks)


def _in_turn(experts: NDArray[np.intp], weight: NDArray[np.float64], copies: IntArray) -> IntArray:
    ranks = np.full(weight.size, -1, np.int32)
    so_far, holders = [0.0] * copies.shape[1], _holders(copies)
    for expert in experts.tolist():
        ranks[expert] = rank = min(holders[expert], key=so_far.__getitem__)
        so_far[rank] += float(weight[expert])
    return ranks


def _holders(copies: IntArray) -> list[list[int]]:
    """The ranks that hold each expert."""
    holders: list[list[int]] = [[] for _ in copies]
    for expert, rank in np.argwhere(copies).tolist():
        holders[expert].append(rank)
    return holders


def _relieved(ranks: IntArray, holders: Sequence[Sequence[int]], num_ranks: int) -> bool:
    """Whether one of the ranks that read most got rid of an expert; changes ``ranks``."""
    reads = np.bincount(ranks[ranks >= 0], minlength=num_ranks)
    most = int(reads.max())
    reached = deque(np.flatnonzero(reads == most).tolist())
    arrives: dict[int, int] = dict.fromkeys(reached, -1)  # by rank, the expert that would move
    while reached:
        rank = reached.popleft()
        if reads[rank] <= most - 2:
            while (expert := arrives[rank]) >= 0:
                ranks[expert], rank = rank, int(ranks[expert])
            return True
        for expert in np.flatnonzero(ranks == rank).tolist():
            for target in holders[expert]:
                if target not in arrives:
                    arrives[target] = expert
                    reached.append(target)
    return False
