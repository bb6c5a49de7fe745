"""Several ranks on one device: their experts, slots and flags in separate buffers.

For checking and measuring the device's streaming kernels in one process; needs Triton. As in
serving, a rank's replica slots lie right behind its masters, in one tensor of L + S experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from ultraep_kernels.device.relays import Sends, new_sends, plan_sends
from ultraep_kernels.device.status import new_status
from ultraep_kernels.device.stream import Programs, Reach, Stream, StreamSizes

from tests.support.bench import PATIENCE_NS, Bench
from tests.support.kernel_checks import require_ok
from ultraep_serve.balance.slots import LayerSlots
from ultraep_serve.types import ExpertShape

_ALIGNMENT = 128  # bytes, of a tensor's start


@dataclass(frozen=True)
class VirtualRanks:
    """Memory of all ranks of one group."""

    shape: ExpertShape
    experts: list[list[torch.Tensor]]  # by rank and tensor, (L + S, bytes) uint8, masters first
    flags: torch.Tensor  # (R, S, C) int64
    reach: Reach  # the same for all of them, as they share a process
    chunks: list[torch.Tensor]  # by rank

    def stream(
        self, rank: int, slot_expert: torch.Tensor, sends: Sends, programs: Programs, **stops: bool
    ) -> Stream:
        """What copies experts of ``rank``."""
        sizes = self.shape.num_ranks, self.shape.num_masters, self.shape.num_replica_slots
        return Stream(sends, slot_expert, rank, self.reach, StreamSizes(*sizes, programs, **stops))

    def empty_slots(self) -> None:
        """Fill all slots with bytes that read as NaN."""
        for tensors in self.experts:
            for tensor in tensors:
                tensor[self.shape.num_masters :].fill_(0xFF)


def make_ranks(
    shape: ExpertShape,
    tensor_bytes: tuple[int, ...],
    chunk_bytes: int,
    device: torch.device | str,
) -> VirtualRanks:
    """Ranks whose experts and slots hold zeros.

    ``tensor_bytes`` of one expert in each tensor, ``chunk_bytes`` a transfer at most.
    """
    starts = [0]
    for size in tensor_bytes:
        end = starts[-1] + shape.num_local * size
        starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
    memory = [
        torch.zeros(starts[-1], dtype=torch.uint8, device=device) for _ in range(shape.num_ranks)
    ]
    experts = [
        [
            own[start : start + shape.num_local * size].view(shape.num_local, size)
            for start, size in zip(starts, tensor_bytes, strict=False)
        ]
        for own in memory
    ]
    slots = [
        start + shape.num_masters * size for start, size in zip(starts, tensor_bytes, strict=False)
    ]
    chunks = [LayerSlots.of(own, slots, list(tensor_bytes), chunk_bytes).chunks for own in experts]
    flag_shape = (shape.num_ranks, shape.num_replica_slots, len(chunks[0]))
    flags = torch.zeros(flag_shape, dtype=torch.int64, device=device)
    addresses = _addresses(memory, device), _addresses(list(flags), device)
    status = new_status(device)
    reach = Reach(*addresses, len(chunks[0]), status, status.clone())
    tables = [torch.tensor([len(own), *own.reshape(-1)], device=device) for own in chunks]
    return VirtualRanks(shape, experts, flags, reach, tables)


def fill_masters(ranks: VirtualRanks) -> None:
    """Random bytes, the same every time."""
    generator = torch.Generator(ranks.flags.device).manual_seed(0)
    for tensors in ranks.experts:
        for tensor in tensors:
            tensor[: ranks.shape.num_masters].random_(0, 256, generator=generator)


def check_stream(
    bench: Bench, ranks: VirtualRanks, slot_expert: torch.Tensor, mode: str, number: int
) -> float | None:
    """Fill all ranks' slots, ``slot_expert`` (R, S), in epoch ``number``; ``mode`` of relays.

    Returns the microseconds that it takes in a CUDA graph, None under the interpreter. Raises
    AssertionError where a slot does not hold its master's bytes.
    """
    ranks.empty_slots()
    sends = sends_of(ranks, slot_expert, mode)
    for send in sends:
        send.epoch.fill_(number)
    _, microseconds = bench.replayed(sender(bench, ranks, slot_expert, sends))
    require_arrived(ranks, slot_expert, sends[0].epoch)
    return microseconds


def sends_of(ranks: VirtualRanks, slot_expert: torch.Tensor, mode: str) -> list[Sends]:
    """Who sends what, by rank; all ranks are in one domain."""
    num_ranks, masters = ranks.shape.num_ranks, ranks.shape.num_masters
    return [plan_sends(slot_expert, masters, mode, num_ranks, rank) for rank in range(num_ranks)]


def sender(
    bench: Bench,
    ranks: VirtualRanks,
    slot_expert: torch.Tensor,
    sends: list[Sends],
) -> Callable[[], None]:
    """Lets all ranks send, and then forward: they share a device, and none waits for a later one.

    What one of them sends and forwards is apart only here; in serving it is one launch.
    """
    kinds = [kind for kind in (0, 1) if any(int(send.tasks[kind, 0]) for send in sends)]
    programs = Programs(bench.num_programs, bench.num_programs)
    phases = [
        [
            ranks.stream(rank, slot_expert, _only(send, kind), programs)
            for rank, send in enumerate(sends)
        ]
        for kind in kinds
    ]

    def run() -> None:
        for phase in phases:
            pairs = zip(phase, ranks.chunks, strict=True)
            bench.at_once([partial(stream.send, chunks) for stream, chunks in pairs])

    return run


def require_arrived(ranks: VirtualRanks, slot_expert: torch.Tensor, epoch: torch.Tensor) -> None:
    """Wait for all ranks' slots; AssertionError where one does not hold its master's bytes."""
    nothing = new_sends(*slot_expert.shape, epoch.device)  # of a plan that is followed
    nothing.epoch.copy_(epoch)
    for rank, chunks in enumerate(ranks.chunks):
        ranks.stream(rank, slot_expert, nothing, Programs(0, 0)).receive(chunks, PATIENCE_NS)
    require_ok(ranks.reach.status)
    wrong = _wrong_slots(ranks, slot_expert)
    assert not wrong, f"(rank, slot) {wrong} differ from their masters"


def _only(sends: Sends, kind: int) -> Sends:
    """The direct (0) or the relayed (1) tasks of one rank."""
    tasks = sends.tasks.clone()
    tasks[1 - kind, 0] = 0
    return sends._replace(tasks=tasks)


def _wrong_slots(ranks: VirtualRanks, slot_expert: torch.Tensor) -> list[tuple[int, int]]:
    """(rank, slot) of filled slots whose bytes are not their master's."""
    masters = ranks.shape.num_masters
    return [
        (rank, slot)
        for rank, row in enumerate(slot_expert.tolist())
        for slot, expert in enumerate(row)
        if expert >= 0
        and not all(
            torch.equal(mine[masters + slot], theirs[expert % masters])
            for mine, theirs in zip(
                ranks.experts[rank], ranks.experts[expert // masters], strict=True
            )
        )
    ]


def _addresses(tensors: list[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=device)
