"""Policy ``eplb``: placement from past loads, even split among the copies of an expert.

Source: DeepSeek's Expert Parallelism Load Balancer, the global policy of its public README
(https://github.com/deepseek-ai/EPLB) and section 3.4 of the DeepSeek-V3 report
(arXiv 2412.19437): redundant copies go to the experts that are heaviest per copy, then all copies
are packed onto ranks, heaviest first, each on the least loaded rank with room.

Two variants. ``eplb`` (replay only): every expert may move, a rank holds any E / R + S experts. It
is planned anew before every batch from the window it is given, and over all ranks even where
domains are smaller, since its weights move between batches. Deployments do so every thousand steps
or more, so these figures flatter it. ``eplb-slots`` (replay and servers): masters stay and only the
S slots of a rank are filled. Two copies of one expert on one rank would help nobody: the second is
left out.

``LoadHistory`` keeps the past loads for a server. They come from exchanges, so every rank keeps the
same history and makes the same plan.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.planner.placement import Counts, Placement, even_shares, master_copies, slots_of
from ultraep_serve.types import ExpertShape, IntArray, Plan

__all__ = ["LoadHistory", "even_split", "past_copies", "place_eplb", "place_eplb_slots"]


def place_eplb(loads: Counts, shape: ExpertShape, history: Counts, domain_size: int) -> Placement:
    """Free placement of E / R + S experts per rank; arguments as ``PolicyFunction``."""
    copies = past_copies(history, shape, fixed_masters=False)
    return Placement(even_shares(loads, copies).sum(0, dtype=np.int32), copies, None)


def place_eplb_slots(
    loads: Counts, shape: ExpertShape, history: Counts, domain_size: int
) -> Placement:
    """The same method where masters stay and only the S slots of a rank are filled."""
    copies = past_copies(history, shape, fixed_masters=True, domain_size=domain_size)
    quota = even_shares(loads, copies).sum(0, dtype=np.int32)
    return Placement(quota, copies, slots_of(copies - master_copies(shape), shape))


def even_split(loads: Counts, placement: Placement) -> IntArray:
    """Shares (R, E, R) of tokens that take the copies in turn."""
    return even_shares(loads, placement.copies)


def past_copies(
    history: Counts, shape: ExpertShape, *, fixed_masters: bool, domain_size: int | None = None
) -> IntArray:
    """Copies (E, R) by the past loads (N, R, E); masters only where there are none yet.

    ``domain_size`` matters to fixed masters only: their copies stay in their domain.
    """
    weight = history.sum((0, 1))
    if not weight.any():
        return master_copies(shape)
    domain = (domain_size or shape.num_ranks) if fixed_masters else shape.num_ranks
    counts = _replicate(weight, shape.num_ranks * shape.num_replica_slots, domain)
    return _pack(weight / counts, counts, shape, fixed_masters, domain)


def _replicate(weight: Counts, num_redundant: int, most: int) -> Counts:
    """Copies per expert (E,): each redundant one to the expert that is heaviest per copy."""
    counts = np.ones(weight.size, np.int64)
    for _ in range(num_redundant):
        per_copy = np.where(counts < most, weight / counts, -1.0)
        heaviest = int(per_copy.argmax())
        if per_copy[heaviest] <= 0:
            break  # what is left was never chosen, or is on every rank
        counts[heaviest] += 1
    return counts


def _pack(
    per_copy: np.ndarray[tuple[int], np.dtype[np.float64]],
    counts: Counts,
    shape: ExpertShape,
    fixed_masters: bool,
    domain_size: int,
) -> IntArray:
    """Copies onto ranks, heaviest first, each on the least loaded rank with room for it."""
    masters = master_copies(shape)
    copies = masters.copy() if fixed_masters else np.zeros_like(masters)
    rank_load = per_copy @ copies
    room = np.full(shape.num_ranks, shape.num_local) - copies.sum(0)
    domain = np.arange(shape.num_ranks) // domain_size
    home = np.arange(counts.size) // shape.num_masters
    # First copies come before second ones of the same weight: each expert needs one.
    order = [(expert, copy) for expert in range(counts.size) for copy in range(counts[expert])]
    order.sort(key=lambda item: (-per_copy[item[0]], item[1]))
    unplaced = counts.size if not fixed_masters else 0
    for expert, copy in order:
        if copy == 0 and fixed_masters:
            continue
        allowed = (room > 0) & (copies[expert] == 0)
        if fixed_masters:
            allowed &= domain == domain[home[expert]]
        if not allowed.any() or (copy > 0 and room.sum() <= unplaced):
            continue
        rank = int(np.where(allowed, rank_load, np.inf).argmin())
        copies[expert, rank] = 1
        rank_load[rank] += per_copy[expert]
        room[rank] -= 1
        unplaced -= copy == 0
    return copies


HISTORY_BATCHES = 8  # as in `ultraep-serve replay`


class LoadHistory:
    """Expert loads of the last batches, layer by layer."""

    def __init__(self, num_layers: int, batches: int = HISTORY_BATCHES) -> None:
        self._past: list[deque[NDArray[np.int64]]] = [
            deque(maxlen=batches) for _ in range(num_layers)
        ]
        # Compiled, or loaded from disk, now: no batch waits for that.
        even_shares(np.zeros((1, 1), np.int64), np.ones((1, 1), np.int32))

    def add(self, layer: int, loads: NDArray[np.int64]) -> None:
        """``layer`` of one more batch had ``loads`` (R, E)."""
        self._past[layer].append(loads.sum(axis=0))

    def plan_eplb(
        self,
        layer: int,
        loads: NDArray[np.int64],
        shape: ExpertShape,
        source_rank: int,
        domain_size: int,
    ) -> Plan | None:
        """Replicas by past loads, ``loads`` (R, E) split evenly; None where the past asks for none.

        What ``policies.registry`` calls "eplb-slots": masters stay and only slots are filled. It is
        followed even where it makes this batch worse, as a balancer that cannot see it would.
        Copies stay within groups of ``domain_size`` ranks.
        """
        if not self._past[layer]:
            return None
        past = np.stack(self._past[layer])[:, None]  # (N, 1, E): who chose does not matter
        counts = np.ascontiguousarray(loads)
        placement = place_eplb_slots(counts, shape, past, domain_size)
        slot_expert = placement.slot_expert
        if slot_expert is None or (slot_expert < 0).all():
            return None
        share = even_shares(counts, placement.copies)[source_rank]
        return Plan(slot_expert=slot_expert, quota=placement.quota, share=share)
