"""stream: master weights -> replica slots of other ranks, chunk by chunk, direct or relayed.

Owners push. Chunk c of slot (r, s) raises flag (r, s, c) at its target to the current epoch; flags
only grow, so they are never reset. A relay is a rank that holds a replica of the same expert itself
and forwards each chunk as soon as it has arrived, out of its own slot. Twin: ``device.stream``.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultraep_kernels.host._atomics import copy_bytes, load_acquire, store_release
from ultraep_kernels.host._compile import compiled


class Reach(NamedTuple):
    """How a rank reaches the slots of its domain; addresses as mapped by this rank."""

    pools: NDArray[np.int64]  # (R,): the ranks' slot pools
    flags: NDArray[np.int64]  # (R,): their chunk flags, (S, max_chunks) int64 each
    max_chunks: int  # of the largest layer


@compiled
def stream_chunks(
    parents: Any,
    slot_expert: Any,
    num_masters: int,
    chunks: Any,
    reach: Reach,
    rank: int,
    epoch: int,
    progress: Any,
    spins: int,
) -> bool:
    """Push and forward what this rank has to; False if a relayed chunk has still not arrived.

    parents, slot_expert (R, S); chunks (C, 4): where each lies in the first master, bytes from a
    pool's start to it in slot 0, bytes from one expert to the next, its size, all int64; progress
    (R, S) chunks already sent, zero at first. Call again
    with the same progress after False; each call looks at most ``spins`` times at chunks that have
    not arrived.
    """
    pools, flags, max_chunks = reach
    num_ranks, num_slots = slot_expert.shape
    for _ in range(spins):
        waiting = False
        for step in range(num_ranks * num_slots):
            target = (rank + step // num_slots) % num_ranks
            slot = step % num_slots
            expert, parent = slot_expert[target, slot], parents[target, slot]
            sender = parent // num_slots if parent >= 0 else expert // num_masters
            if expert < 0 or sender != rank:
                continue
            own = parent % num_slots
            while progress[target, slot] < chunks.shape[0]:
                chunk = progress[target, slot]
                master, region = chunks[chunk, 0], chunks[chunk, 1]
                stride, size = chunks[chunk, 2], chunks[chunk, 3]
                if parent < 0:
                    source = master + (expert - rank * num_masters) * stride
                else:
                    flag = flags[rank] + (own * max_chunks + chunk) * 8
                    if load_acquire(flag) < epoch:
                        waiting = True
                        break
                    source = pools[rank] + region + own * stride
                copy_bytes(pools[target] + region + slot * stride, source, size)
                store_release(flags[target] + (slot * max_chunks + chunk) * 8, epoch)
                progress[target, slot] += 1
        if not waiting:
            return True
    return False
