"""stream: master weights -> replica slots of other ranks, chunk by chunk, direct or relayed.

Owners push. Chunk c of slot (r, s) raises flag (r, s, c) at its target to the current epoch; flags
only grow, so they are never reset. A relay is a rank that holds a replica of the same expert itself
and forwards each chunk as soon as it has arrived, out of its own slot.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from ultraep_kernels._atomics import copy_bytes, load_acquire, store_release

__all__ = ["relay_parents", "stream_chunks"]

MIN_RELAYED_REPLICAS = 4
MAX_RELAYS = 8
MIN_FAN_OUT_SAVED = 2
SMALL_DOMAIN = 8


@njit(cache=True, nogil=True)
def _parents_kernel(slot_expert: Any, num_masters: int, min_replicas: int, parents: Any) -> Any:
    """Fill ``parents`` (R, S) and return sends per rank (R,)."""
    num_ranks, num_slots = slot_expert.shape
    sends = np.zeros(num_ranks, dtype=np.int64)
    replicas = np.zeros(num_ranks * num_masters, dtype=np.int64)
    for rank in range(num_ranks):
        for slot in range(num_slots):
            if slot_expert[rank, slot] >= 0:
                replicas[slot_expert[rank, slot]] += 1
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
    return sends


def relay_parents(
    slot_expert: NDArray[np.int32], num_masters: int, mode: str, domain_size: int
) -> NDArray[np.int64]:
    """Who sends each slot its weights, (R, S) int64: -1 the master, else ``rank * S + slot``.

    An expert with n replicas gets about sqrt(n) relays, at most 8, from 4 replicas on, and only
    where that lowers the busiest sender's fan-out by at least 2 and the domain has more than 8
    ranks (rule published with UltraEP, arXiv 2606.04101). ``mode`` "always" relays from 2 replicas
    on, "never" does not; every rank computes the same answer from the plan alone.
    """
    direct = np.empty(slot_expert.shape, dtype=np.int64)
    sends = _parents_kernel(slot_expert, num_masters, np.iinfo(np.int64).max, direct)
    if mode == "never" or (mode == "auto" and domain_size <= SMALL_DOMAIN):
        return direct
    relayed = np.empty_like(direct)
    min_replicas = 2 if mode == "always" else MIN_RELAYED_REPLICAS
    relayed_sends = _parents_kernel(slot_expert, num_masters, min_replicas, relayed)
    saved = sends.max() - relayed_sends.max()
    return relayed if mode == "always" or saved >= MIN_FAN_OUT_SAVED else direct


@njit(cache=True, nogil=True)
def _is_sender(rank: int, expert: int, parent: int, num_masters: int, num_slots: int) -> bool:
    """Whether ``rank`` sends ``expert`` to a slot with this ``parent``."""
    if expert < 0:
        return False
    return (parent // num_slots if parent >= 0 else expert // num_masters) == rank


@njit(cache=True, nogil=True)
def stream_chunks(
    rank: int,
    epoch: int,
    num_masters: int,
    slot_expert: Any,
    parents: Any,
    master_addresses: Any,
    pool_addresses: Any,
    region_offsets: Any,
    expert_bytes: Any,
    chunks: Any,
    flag_addresses: Any,
    max_chunks: int,
    progress: Any,
    spins: int,
) -> bool:
    """Push and forward what this rank has to; False if a relayed chunk has still not arrived.

    slot_expert, parents (R, S); master_addresses (N,) of this rank's N expert tensors;
    pool_addresses (R,) of the ranks' slot pools as mapped here; region_offsets, expert_bytes (N,);
    chunks (C, 3) tensor index, offset, size; flag_addresses (R,) of the ranks' (S, max_chunks)
    flags; progress (R, S) chunks already sent, zero at first. Call again with the same progress
    after False; each call looks at most ``spins`` times at chunks that have not arrived.
    """
    num_ranks, num_slots = slot_expert.shape
    for _ in range(spins):
        waiting = False
        for step in range(num_ranks * num_slots):
            target = (rank + step // num_slots) % num_ranks
            slot = step % num_slots
            expert, parent = slot_expert[target, slot], parents[target, slot]
            if not _is_sender(rank, expert, parent, num_masters, num_slots):
                continue
            own = parent % num_slots
            while progress[target, slot] < chunks.shape[0]:
                chunk = progress[target, slot]
                tensor, offset, size = chunks[chunk, 0], chunks[chunk, 1], chunks[chunk, 2]
                if parent < 0:
                    master = expert - rank * num_masters
                    source = master_addresses[tensor] + master * expert_bytes[tensor]
                else:
                    flag = flag_addresses[rank] + (own * max_chunks + chunk) * 8
                    if load_acquire(flag) < epoch:
                        waiting = True
                        break
                    source = pool_addresses[rank] + region_offsets[tensor]
                    source += own * expert_bytes[tensor]
                destination = pool_addresses[target] + region_offsets[tensor]
                destination += slot * expert_bytes[tensor]
                copy_bytes(destination + offset, source + offset, size)
                store_release(flag_addresses[target] + (slot * max_chunks + chunk) * 8, epoch)
                progress[target, slot] += 1
        if not waiting:
            return True
    return False
