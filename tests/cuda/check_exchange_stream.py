"""exchange and stream between processes that share memory (run by test_interpreted)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ultraep_kernels.device.exchange import exchange, inbox_bytes, new_epoch
from ultraep_kernels.device.relays import Sends, plan_sends
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.device.stream import StreamTables, stream, wait_slots

from tests.support.ranks import fresh_run_path, run_ranks

WIDTH = 13  # int32 per exchanged row
SIZES = (1040, 37, 64)  # bytes per expert of three tensors; the second is never aligned
CHUNK = 512
MASTERS = 2
SLOTS = 2
MODES = ("always", "never", "always")  # relays, by epoch
PATIENCE_NS = 300_000_000  # counted in looks, of which the interpreter makes fewer a second
CHUNKS = np.array(
    [
        (tensor, offset, min(CHUNK, size - offset))
        for tensor, size in enumerate(SIZES)
        for offset in range(0, size, CHUNK)
    ],
    dtype=np.int64,
)
REGIONS = (
    0,
    SLOTS * SIZES[0],
    SLOTS * (SIZES[0] + SIZES[1]) + 6,
)  # 16-byte aligned where it can be
POOL_BYTES = REGIONS[2] + SLOTS * SIZES[2]


class Host:
    """One rank's view of everybody's shared memory, and its own masters."""

    def __init__(self, rank: int, num_ranks: int, folder: Path) -> None:
        inbox = inbox_bytes(num_ranks, WIDTH)
        flags = SLOTS * len(CHUNKS) * 8
        self.segments = [
            np.memmap(folder / f"segment-{r}", np.uint8, "r+", shape=(inbox + flags + POOL_BYTES,))
            for r in range(num_ranks)
        ]
        starts = np.array([segment.ctypes.data for segment in self.segments], dtype=np.int64)
        self.inboxes = torch.from_numpy(starts)
        self.masters = [master_bytes(rank, tensor, 0) for tensor in range(len(SIZES))]
        self.tables = StreamTables(
            master_addresses=torch.tensor([tensor.ctypes.data for tensor in self.masters]),
            pool_addresses=torch.from_numpy(starts + inbox + flags),
            region_offsets=torch.tensor(REGIONS),
            expert_bytes=torch.tensor(SIZES),
            chunks=torch.from_numpy(CHUNKS),
            flag_addresses=torch.from_numpy(starts + inbox),
            max_chunks=len(CHUNKS),
        )
        self.pool = self.segments[rank][inbox + flags :]
        self.epoch, self.status = new_epoch("cpu"), new_status("cpu")

    def slot(self, slot: int, tensor: int) -> np.ndarray:
        start = REGIONS[tensor] + slot * SIZES[tensor]
        return self.pool[start : start + SIZES[tensor]]


def master_bytes(rank: int, tensor: int, epoch: int) -> np.ndarray:
    rng = np.random.default_rng((rank, tensor, epoch))
    return rng.integers(0, 256, (MASTERS, SIZES[tensor]), dtype=np.uint8)


def make_segments(folder: Path, num_ranks: int) -> None:
    size = inbox_bytes(num_ranks, WIDTH) + SLOTS * len(CHUNKS) * 8 + POOL_BYTES
    for rank in range(num_ranks):
        (folder / f"segment-{rank}").write_bytes(bytes(size))


def plan_of(num_ranks: int, epoch: int) -> np.ndarray:
    """(R, S): an expert of the first rank on all others, and some that go from hand to hand."""
    slot_expert = np.full((num_ranks, SLOTS), -1, np.int32)
    slot_expert[1:, 0] = epoch % MASTERS
    ranks = np.arange(num_ranks)
    slot_expert[:, 1] = (ranks + epoch) % num_ranks * MASTERS + 1
    slot_expert[slot_expert // MASTERS == ranks[:, None]] = -1
    return slot_expert


def balance(rank: int, num_ranks: int, folder: Path) -> list[int]:
    """Epochs of exchange, stream and wait; the status. Called in a process per rank."""
    host = Host(rank, num_ranks, folder)
    for epoch, mode in enumerate(MODES, 1):
        row = torch.arange(WIDTH, dtype=torch.int32) + 100 * rank + 10_000 * epoch
        rows = exchange(row, host.inboxes, rank, host.epoch, host.status, PATIENCE_NS)
        others = torch.arange(num_ranks, dtype=torch.int32) * 100 + 10_000 * epoch
        assert torch.equal(rows, others[:, None] + torch.arange(WIDTH, dtype=torch.int32))
        for tensor, masters in enumerate(host.masters):
            masters[:] = master_bytes(rank, tensor, epoch)
        slot_expert = torch.from_numpy(plan_of(num_ranks, epoch))
        sends = plan_sends(slot_expert, MASTERS, rank, mode, num_ranks)
        common = slot_expert, MASTERS, host.tables, rank, host.epoch, host.status, PATIENCE_NS
        stream(sends, *common, num_programs=3)
        wait_slots(slot_expert, host.tables, rank, host.epoch, host.status, PATIENCE_NS)
        for slot, expert in enumerate(slot_expert[rank].tolist()):
            for tensor in range(len(SIZES) if expert >= 0 else 0):
                expected = master_bytes(expert // MASTERS, tensor, epoch)[expert % MASTERS]
                assert np.array_equal(host.slot(slot, tensor), expected)
    return [host.status.item(), int(host.epoch[0])]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_slots_get_their_masters_bytes_across_processes(num_ranks: int) -> None:
    with fresh_run_path() as folder:
        make_segments(folder, num_ranks)
        ended = run_ranks(balance, num_ranks, num_ranks, folder, timeout_seconds=120)
    assert ended == [[DeviceStatus.OK, len(MODES)]] * num_ranks


def test_a_silent_rank_ends_every_wait(tmp_path: Path) -> None:
    """Rank 1 of 3 relays to rank 2, but rank 0, its sender, is gone."""
    make_segments(tmp_path, 3)
    host = Host(1, 3, tmp_path)
    row = torch.zeros(WIDTH, dtype=torch.int32)
    exchange(row, host.inboxes, 1, host.epoch, host.status, patience_ns=20_000)
    assert host.status.item() == DeviceStatus.EXCHANGE_TIMEOUT
    assert host.epoch[0] == 1
    slot_expert = torch.tensor([[-1, -1], [0, -1], [0, -1]], dtype=torch.int32)
    parents = torch.tensor([[-1, -1], [-1, -1], [2, -1]], dtype=torch.int32)
    sends = Sends(parents, torch.tensor([[0] * 7, [1, 4] + [0] * 5], dtype=torch.int32))
    host.status.zero_()
    arguments = host.tables, 1, host.epoch, host.status, 20
    stream(sends, slot_expert, MASTERS, *arguments, num_programs=1)
    assert host.status.item() == DeviceStatus.RELAY_TIMEOUT
    host.status.zero_()
    wait_slots(slot_expert, *arguments)
    assert host.status.item() == DeviceStatus.SLOT_TIMEOUT
    assert not host.segments[2][inbox_bytes(3, WIDTH) :].any()  # nothing was forwarded


def test_only_the_chunks_that_have_arrived_are_forwarded(tmp_path: Path) -> None:
    make_segments(tmp_path, 3)
    host = Host(1, 3, tmp_path)
    host.epoch[0] = 5
    start = inbox_bytes(3, WIDTH)
    flags = [
        segment[start : start + SLOTS * len(CHUNKS) * 8].view(np.int64) for segment in host.segments
    ]
    flags[1][:3] = (5, 4, 5)  # the second is of the epoch before
    slot_expert = torch.tensor([[-1, -1], [0, -1], [0, -1]], dtype=torch.int32)
    parents = torch.tensor([[-1, -1], [-1, -1], [2, -1]], dtype=torch.int32)
    sends = Sends(parents, torch.tensor([[0] * 7, [1, 4] + [0] * 5], dtype=torch.int32))
    common = slot_expert, MASTERS, host.tables, 1, host.epoch, host.status, 5
    stream(sends, *common, num_programs=2)
    assert host.status.item() == DeviceStatus.RELAY_TIMEOUT
    assert flags[2][: len(CHUNKS)].tolist() == [5, 0, 5] + [0] * (len(CHUNKS) - 3)
