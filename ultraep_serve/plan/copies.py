"""Which rank holds which expert, as copies (E, R) of 0 and 1."""

import numpy as np

from ultraep_serve.types import ExpertShape, IntArray


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
