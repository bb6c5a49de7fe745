"""Our dispatch and combine on CPU beside the collectives that vLLM is going to have there.

    python benchmarks/transport.py

Two data-parallel ranks compute a layer of the demo's size, each for its own tokens. "rows" is what
serves today: every assignment goes as a row to the rank that computes it, by gloo. The others have
all tokens gathered and sums scattered (vllm-project/vllm#47778) by collectives of that interface
over what vLLM has: by gloo, as its data-parallel ranks have it today, and in shared memory, as its
tensor-parallel ranks. Every round has each once; the slower rank's time counts.
"""

import time
from copy import copy
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
import torch.distributed as dist

from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_lab.bench.prefill import balanced_orders, ratios_json

RANKS, EXPERTS, SIZE, TOP_K = 2, 16, (512, 768), 4  # experts of a rank; H, I
TOKENS = ((4, 4), (64, 64), (512, 512), (2048, 2048), (2048, 4))  # of either rank
ROUNDS, WARM = 15, 3
GATHERED = ("gloo", "shared memory")


def on_rank(rank: int, path: str) -> list[dict[str, list[float]]]:
    """Seconds of each transport and round, for each of ``TOKENS``."""
    from vllm.platforms import current_platform

    from tests.support.vllm_cpu_layers import make_layer
    from tests.support.vllm_ragged import join_group, ragged_communicator
    from ultraep_serve.engines.vllm import cpu_experts

    current_platform.import_kernels()
    torch.set_num_threads(1)
    group = join_group(rank, RANKS, path)
    layer, _ = make_layer((EXPERTS, *SIZE, TOP_K))
    way = cpu_experts.ways_of(layer)[0]
    transports = {"rows": partial(cpu_experts.dispatch_compute_combine, group=group.cpu_group)}
    for name in GATHERED:
        own = copy(group)
        own.device_communicator = ragged_communicator(group, in_shared_memory=name != "gloo")
        transports[name] = partial(cpu_experts.gather_compute_scatter, group=own)
    found, orders = [], balanced_orders(tuple(transports))
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens[rank], SIZE[0], generator=generator).bfloat16()
        scores = torch.rand(tokens[rank], RANKS * EXPERTS, generator=generator)
        weights, physical = scores.topk(TOP_K)
        batch = x, weights, cpu_experts.Assignments.from_physical(physical, EXPERTS)
        outputs, seconds = {}, {name: [] for name in transports}
        for turn in range(WARM + ROUNDS):
            for name in orders[turn % len(orders)]:
                dist.barrier(group.cpu_group)
                start = time.perf_counter()
                outputs[name] = transports[name](lambda _: way, *batch)
                if turn >= WARM:
                    seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(outputs["rows"], outputs[name]) for name in GATHERED)
        found.append(seconds)
    return found


def summary(tokens: tuple[int, int], ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Of the rounds of both ranks."""
    first, second = ranks
    slower = {name: list(map(max, first[name], second[name])) for name in first}
    return {
        "tokens": tokens,
        "ms": {name: round(median(each) * 1e3, 3) for name, each in slower.items()},
        "over_rows": {
            name: ratios_json(
                [one / other for one, other in zip(slower[name], slower["rows"], strict=True)]
            )
            for name in GATHERED
        },
    }


def main() -> None:
    options = harness.parser(__doc__, "transport.json").parse_args()
    with fresh_run_path() as path:
        ranks = run_ranks(on_rank, RANKS, str(path), timeout_seconds=600.0)
    rows = [summary(tokens, [each[i] for each in ranks]) for i, tokens in enumerate(TOKENS)]
    for row in rows:
        print(row)
    about = {"ranks": RANKS, "experts": RANKS * EXPERTS, "size": SIZE, "top_k": TOP_K}
    harness.write(options.json, {**about, "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
