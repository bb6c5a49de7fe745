"""relays: slot_expert (R, S) -> who sends each slot its weights. Twin: ``device.relays``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.contract import MAX_RELAYS, MIN_FAN_OUT_SAVED, MIN_RELAYED_REPLICAS
from ultraep_kernels.host._compile import compiled


@compiled
def _parents_kernel(slot_expert: Any, num_masters: int, min_replicas: int, parents: Any) -> Any:
    """Fill ``parents`` (R, S) and return the most that a rank sends, or receives."""
    num_ranks, num_slots = slot_expert.shape
    sends = np.zeros(num_ranks, dtype=np.int64)
    received = np.zeros(num_ranks, dtype=np.int64)
    replicas = np.zeros(num_ranks * num_masters, dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            if slot_expert[rank, slot] >= 0:
                replicas[slot_expert[rank, slot]] += 1
                received[rank] += 1
    seen = np.zeros_like(replicas)
    relays = np.full((replicas.size, MAX_RELAYS), -1, dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            expert = slot_expert[rank, slot]
            parents[rank, slot] = -1
            if expert < 0:
                continue
            num_relays = replicas[expert]
            if replicas[expert] >= min_replicas:
                num_relays = 1
                while num_relays < MAX_RELAYS and (num_relays + 1) ** 2 <= replicas[expert]:
                    num_relays += 1
            if seen[expert] < num_relays:
                if seen[expert] < MAX_RELAYS:
                    relays[expert, seen[expert]] = rank * num_slots + slot
                sends[expert // num_masters] += 1
            else:
                parents[rank, slot] = relays[expert, seen[expert] % num_relays]
                sends[parents[rank, slot] // num_slots] += 1
            seen[expert] += 1
    return max(sends.max(), received.max())


def relay_parents(
    slot_expert: NDArray[np.int32], num_masters: int, mode: str, min_saved: int = MIN_FAN_OUT_SAVED
) -> NDArray[np.int64]:
    """Who sends each slot its weights, (R, S) int64: -1 the master, else ``rank * S + slot``.

    An expert with n replicas gets about sqrt(n) relays, at most 8, from 4 replicas on (rule
    published with UltraEP, arXiv 2606.04101), and only where all relays together spare the busiest
    link at least ``min_saved`` experts; it carries what a rank sends or what one receives. ``mode``
    "always" relays from 2 replicas on, "never" does not; every rank computes the same answer from
    the plan alone.
    """
    replicas = np.count_nonzero(slot_expert >= 0)
    if mode == "never" or (mode != "always" and replicas < MIN_RELAYED_REPLICAS):
        return np.full(slot_expert.shape, -1, dtype=np.int64)
    direct = np.empty(slot_expert.shape, dtype=np.int64)
    most = _parents_kernel(slot_expert, num_masters, slot_expert.size + 1, direct)
    relayed = np.empty_like(direct)
    min_replicas = 2 if mode == "always" else MIN_RELAYED_REPLICAS
    saved = most - _parents_kernel(slot_expert, num_masters, min_replicas, relayed)
    return relayed if mode == "always" or saved >= min_saved else direct
