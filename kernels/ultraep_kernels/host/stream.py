"""stream: master weights -> replica slots of other ranks, chunk by chunk, direct or relayed.

Owners push. Chunk c of slot (r, s) raises flag (r, s, c) at its target to the current epoch; flags
only grow, so they are never reset. A relay is a rank that holds a replica of the same expert itself
and forwards each chunk as soon as it has arrived, out of its own slot. Twin: ``device.stream``.
"""

from typing import Any

from ultraep_kernels.host._atomics import copy_bytes, load_acquire, store_release
from ultraep_kernels.host._compile import compiled

__all__ = ["stream_chunks"]


@compiled
def _is_sender(rank: int, expert: int, parent: int, num_masters: int, num_slots: int) -> bool:
    """Whether ``rank`` sends ``expert`` to a slot with this ``parent``."""
    if expert < 0:
        return False
    return (parent // num_slots if parent >= 0 else expert // num_masters) == rank


@compiled
def stream_chunks(
    parents: Any,
    slot_expert: Any,
    num_masters: int,
    master_addresses: Any,
    pool_addresses: Any,
    region_offsets: Any,
    expert_bytes: Any,
    chunks: Any,
    flag_addresses: Any,
    max_chunks: int,
    rank: int,
    epoch: int,
    progress: Any,
    spins: int,
) -> bool:
    """Push and forward what this rank has to; False if a relayed chunk has still not arrived.

    parents, slot_expert (R, S); master_addresses (N,) of this rank's N expert tensors;
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
