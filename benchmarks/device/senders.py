"""How fast one rank sends, by its number of senders, alone and beside what dispatch would do.

One rank sends the same experts to two others. The target is NVLink's usable rate: on one GPU there
is no link, so this says whether senders could fill one, not that they do. Beside them runs a
stand-in for an all-gather, which no single GPU can run: as many blocks as NCCL's kernels take, of
as many threads, that copy from memory to memory. ``both_of_longer`` is the
time of both at once over that of the one which takes longer alone: 1 if neither slows the other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from report import Report
from ultraep_kernels.device.stream import Programs

from tests.support.bench import Bench
from tests.support.virtual_ranks import (
    VirtualRanks,
    fill_masters,
    make_ranks,
    require_arrived,
    sends_of,
)
from ultraep_lab.machines import HARDWARE
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES
from ultraep_serve.types import ExpertShape

LINK_TARGET = 0.8  # of NVLink's nominal rate: stores and copy engines reach 0.80 to 0.87
SENDERS, TINY_SENDERS = (1, 2, 4, 8, 16, 24, 32, 48, 64), (1, 2)
DEFAULT_SENDERS = 32  # the one that has to reach the target
SHAPE = ExpertShape(3, 6, 2)
EXPERT_BYTES, TINY_BYTES = (4096 * 4096, 4096 * 2048), (80, 37)
GATHER_BLOCKS, GATHER_WARPS, GATHER_BYTES = 24, 16, 64 << 20
_WORDS = 4096


def run(bench: Bench, report: Report) -> None:
    """One row for each number of senders."""
    sizes = TINY_BYTES if bench.interpreted else EXPERT_BYTES
    chunk = 64 if bench.interpreted else MOST_CHUNK_BYTES
    ranks = make_ranks(SHAPE, sizes, chunk, bench.device)
    fill_masters(ranks)
    gather = stand_in(bench)
    _, alone = bench.replayed(gather)
    for number in TINY_SENDERS if bench.interpreted else SENDERS:
        report.run(f"{number} senders", time_senders, bench, ranks, number, gather, alone)


def time_senders(
    bench: Bench,
    ranks: VirtualRanks,
    number: int,
    gather: Callable[[], None],
    gather_alone: float | None,
) -> dict[str, Any]:
    """Rank 0 sends both its masters to both other ranks."""
    ranks.empty_slots()
    ranks.flags.zero_()
    slots = torch.tensor([[-1, -1], [0, 1], [0, 1]], dtype=torch.int32, device=bench.device)
    sends = sends_of(ranks, slots, "never")[0]
    sends.epoch.fill_(1)
    send = partial(ranks.stream(0, slots, sends, Programs(number, 0)).send, ranks.chunks[0])
    _, microseconds = bench.replayed(send)
    _, both = bench.replayed(lambda: bench.at_once([send, gather]))
    require_arrived(ranks, slots, sends.epoch)
    moved = int((slots >= 0).sum()) * sum(tensor.shape[1] for tensor in ranks.experts[0])
    rate = 1e-3 * moved / microseconds if microseconds else None
    nominal = None if bench.interpreted else link_rate(torch.cuda.get_device_name(0))
    target = LINK_TARGET * nominal if nominal and number == DEFAULT_SENDERS else None
    return {
        "checked": "the masters' bytes",
        "megabytes": moved / 1e6,
        "graph_microseconds": microseconds,
        "gigabytes_per_second": rate,  # sent
        "of_nvlink": rate / nominal if rate and nominal else None,
        "at_least_gb_per_second": target,
        "met": rate >= target if rate and target else None,
        "beside": f"a stand-in for an all-gather: {GATHER_BLOCKS} blocks copy in memory",
        "gather_microseconds": gather_alone,
        "both_microseconds": both,
        "both_of_longer": both / max(microseconds, gather_alone)
        if both and microseconds and gather_alone
        else None,
    }


def link_rate(device_name: str) -> float | None:
    """NVLink's nominal GB/s in one direction; None for a GPU that no data sheet here is of."""
    known = (name for name in HARDWARE if name.removeprefix("g").upper() in device_name.upper())
    return next((HARDWARE[name].link_bytes_per_second / 1e9 for name in known), None)


def stand_in(bench: Bench) -> Callable[[], None]:
    """Launch what copies like a collective's kernel."""
    words = _WORDS * 4 if bench.interpreted else GATHER_BYTES // 4
    source = torch.ones(words, dtype=torch.int32, device=bench.device)
    target = torch.empty_like(source)
    blocks = 2 if bench.interpreted else GATHER_BLOCKS

    def gather() -> None:
        _gather[(blocks,)](
            target, source, words, BLOCKS=blocks, WORDS=_WORDS, num_warps=GATHER_WARPS
        )

    return gather


@triton.jit
def _gather(target_ptr, source_ptr, words, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """A fixed number of programs copy ``words`` of 4 bytes."""
    for start in range(tl.program_id(0) * WORDS, words, BLOCKS * WORDS):
        index = start + tl.arange(0, WORDS)
        tl.store(target_ptr + index, tl.load(source_ptr + index, index < words), index < words)
