"""Copies of experts between ranks on one device, and waits for what does not come."""

import torch
from ultraep_kernels.contract import Decision
from ultraep_kernels.device.exchange import Inboxes, exchange, inbox_bytes, new_epoch
from ultraep_kernels.device.relays import Sends, new_sends
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.device.stream import Programs

from tests.support.bench import Bench
from tests.support.virtual_ranks import VirtualRanks, fill_masters, make_ranks
from ultraep_serve.types import ExpertShape

SIZES = (1040, 37, 64)  # bytes per expert of three tensors; the second's are never aligned
CHUNKS = 5  # of an expert: three, one, one
WIDTH = 13  # int32 per exchanged row


def ranks_of(bench: Bench, num_ranks: int) -> VirtualRanks:
    ranks = make_ranks(ExpertShape(num_ranks, 2 * num_ranks, 2), SIZES, 512, bench.device)
    fill_masters(ranks)
    return ranks


def relaying(ranks: VirtualRanks) -> tuple[Sends, torch.Tensor]:
    """Rank 1 of 3 has what rank 0 sends, and forwards it to rank 2; (sends, slot_expert)."""
    device = ranks.flags.device
    slot_expert = torch.tensor([[-1, -1], [0, -1], [0, -1]], dtype=torch.int32, device=device)
    parents = torch.tensor([[-1, -1], [-1, -1], [2, -1]], dtype=torch.int32, device=device)
    tasks = torch.tensor([[0] * 7, [1, 4] + [0] * 5], dtype=torch.int32, device=device)
    return new_sends(3, 2, device)._replace(parents=parents, tasks=tasks), slot_expert


def test_a_silent_rank_ends_every_wait(bench: Bench) -> None:
    ranks, device = ranks_of(bench, 3), bench.device
    inboxes = torch.zeros((3, inbox_bytes(3, WIDTH)), dtype=torch.uint8, device=device)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    row = torch.zeros(WIDTH, dtype=torch.int32, device=device)
    epoch, status = new_epoch(device), new_status(device)
    own = Inboxes(addresses, 1, epoch, status)
    exchange(row, own, 20_000)
    assert status.item() == DeviceStatus.EXCHANGE_TIMEOUT
    assert epoch[0] == 1
    pushed = inboxes.clone()
    assert pushed.any()
    exchange(row + 1, own, 20_000)
    assert epoch[0] == 2
    assert torch.equal(inboxes, pushed), "who has given up may overwrite rows still to be read"
    sends, slot_expert = relaying(ranks)
    sends.epoch.fill_(2)
    chunks, status, reported = ranks.chunks[1], ranks.reach.status, ranks.reach.reported
    stream = ranks.stream(1, slot_expert, sends, Programs(1, 1), stops=False)
    stream.send(chunks)
    assert status.item() == DeviceStatus.OK, "what runs beside dispatch gives up nothing"
    stream.receive(chunks, 20)
    assert DeviceStatus.RELAY_TIMEOUT in DeviceStatus(status.item())
    stream = ranks.stream(1, slot_expert, sends, Programs(1, 0), stops=False)
    for decision, expected in (
        (Decision.BALANCED, DeviceStatus(0)),
        (Decision.PLANNED, DeviceStatus.SLOT_TIMEOUT),
    ):
        for word in (status, reported):
            word.zero_()
        sends.decision.fill_(decision)
        stream.receive(chunks, 20)
        assert status.item() == reported.item() == expected
    assert not ranks.flags.any()  # nothing was forwarded
    assert not any(tensor[2:].any() for tensor in ranks.experts[2])


def test_only_the_chunks_that_have_arrived_are_forwarded(bench: Bench) -> None:
    ranks = ranks_of(bench, 3)
    assert ranks.flags.shape == (3, 2, CHUNKS)
    ranks.flags[1, 0, :3] = torch.tensor((5, 4, 5))  # the second is of the epoch before
    sends, slot_expert = relaying(ranks)
    sends.epoch.fill_(5)
    chunks, status = ranks.chunks[1], ranks.reach.status
    stream = ranks.stream(1, slot_expert, sends, Programs(1, 2), stops=False)
    stream.send(chunks)
    assert status.item() == DeviceStatus.OK
    assert ranks.flags[2, 0].tolist() == [5, 0, 5] + [0] * (CHUNKS - 3)
    stream.receive(chunks, 5)
    assert status.item() == DeviceStatus.RELAY_TIMEOUT | DeviceStatus.SLOT_TIMEOUT
    assert ranks.flags[2, 0].tolist() == [5, 0, 5] + [0] * (CHUNKS - 3)
    assert ranks.flags[2, 1].tolist() == [0] * CHUNKS


def test_what_comes_after_the_stream_is_forwarded_where_slots_are_received(bench: Bench) -> None:
    """A relay beside dispatch waits for nothing long, and nothing is forwarded twice."""
    ranks = ranks_of(bench, 3)
    ranks.flags[1, 0, :2] = 5
    sends, slot_expert = relaying(ranks)
    sends.epoch.fill_(5)
    chunks = ranks.chunks[1]
    stream = ranks.stream(1, slot_expert, sends, Programs(1, 1))
    stream.send(chunks)
    assert ranks.flags[2, 0].tolist() == [5, 5] + [0] * (CHUNKS - 2)
    ranks.flags[1, 0] = 5
    ranks.flags[2, 0, :2] = 0
    stream.receive(chunks, 10**9)
    assert ranks.reach.status.item() == DeviceStatus.OK
    assert ranks.flags[2, 0].tolist() == [0, 0] + [5] * (CHUNKS - 2)
    assert not sends.turns.any()
