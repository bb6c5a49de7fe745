"""One rank's row and exchange, all of whose peers have posted: the part that is not waiting."""

from typing import Any

import numpy as np
import torch
from bench import PATIENCE_NS, Bench
from report import Report, require_equal, require_ok
from ultraep_kernels.contract import FLAG_BYTES, HEADER_WIDTH
from ultraep_kernels.device.exchange import (
    exchange,
    inbox_bytes,
    new_epoch,
    row_reference,
    write_row,
)
from ultraep_kernels.device.status import new_status

POSTED = 1 << 40  # an epoch that no measurement reaches
FULL = ((8, 128), (16, 128), (64, 256), (72, 504))  # (R, E)
TINY = ((4, 16),)


def run(bench: Bench, report: Report) -> None:
    """Every size."""
    for num_ranks, num_experts in TINY if bench.dry_run else FULL:
        report.run("exchange", check_exchange, bench, num_ranks, num_experts)


def check_exchange(bench: Bench, num_ranks: int, num_experts: int) -> dict[str, Any]:
    """Rows of all peers, from an inbox that they have filled."""
    microseconds = exchange_microseconds(bench, num_ranks, num_experts)
    return {
        "checked": "the rows posted",
        "ranks": num_ranks,
        "experts": num_experts,
        "graph_microseconds": microseconds,
    }


def exchange_microseconds(bench: Bench, num_ranks: int, num_experts: int) -> float | None:
    """Of rank 0, in a CUDA graph. Raises AssertionError where a row is wrong."""
    width = HEADER_WIDTH + num_experts
    size = inbox_bytes(num_ranks, width)
    inboxes = torch.zeros((num_ranks, size), dtype=torch.uint8, device=bench.device)
    flags = inboxes[0, : num_ranks * FLAG_BYTES].view(torch.int64).view(num_ranks, -1)
    flags[1:, 0] = POSTED
    rows = inboxes[0, num_ranks * FLAG_BYTES :].view(torch.int32).view(2, num_ranks, width)
    posted = torch.arange(num_ranks * width, dtype=torch.int32, device=bench.device)
    rows[:] = posted.view(num_ranks, width)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=bench.device)
    load = posted[:num_experts]
    unknown, choice = (torch.ones(n, dtype=torch.int32, device=bench.device) for n in (1, 2))
    epoch, status = new_epoch(bench.device), new_status(bench.device)

    def swap() -> torch.Tensor:
        row = write_row(load, unknown, choice, has_load=True)
        return exchange(row, addresses, 0, epoch, status, PATIENCE_NS)

    found, microseconds = bench.replayed(swap)
    expected = posted.view(num_ranks, width).cpu().numpy()
    own = row_reference(load.cpu(), unknown.cpu(), choice.cpu(), has_load=True)
    require_equal(found, np.concatenate([own.numpy()[None], expected[1:]]), "exchange")
    require_ok(status)
    return microseconds
