"""Several ranks on one device: their masters, slots and flags in separate buffers.

For checking and measuring the device's streaming kernels in one process; needs Triton.
"""

from dataclasses import dataclass

import torch
from ultraep_kernels.device.relays import Sends
from ultraep_kernels.device.stream import StreamTables

from ultraep_serve.types import ExpertShape

__all__ = ["VirtualRanks", "make_ranks", "only", "wrong_slots"]


@dataclass(frozen=True)
class VirtualRanks:
    """Memory of all ranks of one group."""

    masters: list[list[torch.Tensor]]  # by rank and tensor, (L, bytes) uint8
    pools: list[torch.Tensor]  # by rank, uint8, all slots of one tensor after those of another
    regions: list[int]  # bytes from a pool's start to each tensor's slots
    flags: torch.Tensor  # (R, S, C) int64
    tables: list[StreamTables]  # by rank

    def slot(self, rank: int, slot: int, tensor: int) -> torch.Tensor:
        """Bytes of one tensor of one slot."""
        size = self.masters[0][tensor].shape[1]
        start = self.regions[tensor] + slot * size
        return self.pools[rank][start : start + size]


def make_ranks(
    shape: ExpertShape, tensor_bytes: tuple[int, ...], chunk_bytes: int, device: str
) -> VirtualRanks:
    """Masters with random bytes, empty slots; every tensor's slots begin 16-byte aligned.

    ``tensor_bytes`` of one expert in each tensor, ``chunk_bytes`` a transfer at most.
    """
    generator = torch.Generator(device).manual_seed(0)
    masters = [
        [
            torch.randint(256, (shape.num_masters, size), generator=generator, device=device).to(
                torch.uint8
            )
            for size in tensor_bytes
        ]
        for _ in range(shape.num_ranks)
    ]
    regions = [0]
    for size in tensor_bytes:
        regions.append(-(-(regions[-1] + shape.num_replica_slots * size) // 16) * 16)
    pools = [
        torch.zeros(regions[-1], dtype=torch.uint8, device=device) for _ in range(shape.num_ranks)
    ]
    chunks = [
        (tensor, offset, min(chunk_bytes, size - offset))
        for tensor, size in enumerate(tensor_bytes)
        for offset in range(0, size, chunk_bytes)
    ]
    flag_shape = (shape.num_ranks, shape.num_replica_slots, len(chunks))
    flags = torch.zeros(flag_shape, dtype=torch.int64, device=device)
    tables = [
        StreamTables(
            master_addresses=_addresses(own, device),
            pool_addresses=_addresses(pools, device),
            region_offsets=torch.tensor(regions[:-1], device=device),
            expert_bytes=torch.tensor(tensor_bytes, device=device),
            chunks=torch.tensor(chunks, device=device),
            flag_addresses=_addresses(list(flags), device),
            max_chunks=len(chunks),
        )
        for own in masters
    ]
    return VirtualRanks(masters, pools, regions, flags, tables)


def only(sends: Sends, kind: int) -> Sends:
    """The direct (0) or the relayed (1) tasks of one rank.

    Ranks that take turns on a device run one kind after the other: no rank waits for a later one.
    """
    tasks = sends.tasks.clone()
    tasks[1 - kind, 0] = 0
    return Sends(sends.parents, tasks)


def wrong_slots(ranks: VirtualRanks, slot_expert: torch.Tensor) -> list[tuple[int, int]]:
    """(rank, slot) of filled slots whose bytes are not their master's; ``slot_expert`` (R, S)."""
    num_masters = ranks.masters[0][0].shape[0]
    return [
        (rank, slot)
        for rank, row in enumerate(slot_expert.tolist())
        for slot, expert in enumerate(row)
        if expert >= 0
        and not all(
            torch.equal(ranks.slot(rank, slot, index), tensor[expert % num_masters])
            for index, tensor in enumerate(ranks.masters[expert // num_masters])
        )
    ]


def _addresses(tensors: list[torch.Tensor], device: str) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
