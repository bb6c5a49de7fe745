"""Which rank holds which expert: as copies (E, R) of 0 and 1, and as experts in slots (R, S)."""

import numpy as np

from ultraep_serve.types import ExpertShape, IntArray

__all__ = ["copies_of", "master_copies", "slots_of"]


def master_copies(shape: ExpertShape) -> IntArray:
    """Every expert on its master and nowhere else, (E, R)."""
    copies = np.zeros((shape.num_logical_experts, shape.num_ranks), np.int32)
    experts = np.arange(shape.num_logical_experts)
    copies[experts, experts // shape.num_masters] = 1
    return copies


def copies_of(slot_expert: IntArray, shape: ExpertShape) -> IntArray:
    """Masters and what is in ``slot_expert`` (R, slots), -1 empty: copies (E, R)."""
    copies = master_copies(shape)
    ranks, slots = np.nonzero(slot_expert >= 0)
    copies[slot_expert[ranks, slots], ranks] = 1
    return copies


def slots_of(copies: IntArray, shape: ExpertShape) -> IntArray:
    """Copies (E, R), masters among them -> slot_expert (R, slots), in rising order, -1 empty.

    There are as many slots as the fullest rank needs, and at least ``num_replica_slots``.
    """
    replicas = copies - master_copies(shape)
    width = max(shape.num_replica_slots, int(replicas.sum(0).max()))
    slot_expert = np.full((shape.num_ranks, width), -1, np.int32)
    for rank in range(shape.num_ranks):
        experts = np.flatnonzero(replicas[:, rank])
        slot_expert[rank, : experts.size] = experts
    return slot_expert
