"""How long each way of computing experts takes on this CPU, and with fewer of its instructions.

    python benchmarks/expert_kernels.py
    python benchmarks/expert_kernels.py --sums   writes benchmarks/results/expert-sums.json
    python benchmarks/expert_kernels.py --own    with all of this CPU's instructions only

One thread of one of two ranks computes its half of a layer's experts (vLLM). "without EP" is what
the engine alone has to compute: all experts with half of their inner size, summed in its kernel. A
way is exact if what an expert gives for a token does not depend on the tokens beside it. Fewer
instructions are played: libraries are told to leave them, and vLLM takes its build without them.

--sums measures what it takes to add up the rows that experts give, in the demo model's layer: in
one compiled pass over them, as ranks with few threads do it, and by torch's own operations, as
others do. Every round has each once.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from tests.support.instruction_sets import INSTRUCTION_SETS, PLAYED, own
from ultraep_serve.engines.common.launch import allocator

ROWS = (4, 64, 512)  # of an expert
EXPERTS, TOP_K = 8, 4  # of the rank, which has half of the layer's
SIZES = ((1024, 512), (2048, 768))  # H, I
SWITCHES = {  # of oneDNN, ATen and MKL
    "AVX2": ("AVX2", "avx2", "AVX2"),
    "AVX512": ("AVX512_CORE", "avx512", "AVX512"),
    "AVX512-BF16": ("AVX512_CORE_BF16", "avx512", "AVX512"),
}
PROCESSORS = {  # with as much, for numba
    "AVX2": "haswell",
    "AVX512": "skylake-avx512",
    "AVX512-BF16": "cooperlake",
}
HOPELESS_SECONDS = 0.5
SUM_SIZE, SUM_TOKENS, SUM_ROUNDS = (512, 768), (512, 2048), 15
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_WARNINGS = "ignore"  # torch's own, when vLLM has it compile


def measure_layer(hidden: int, inner: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A finding for each of ``ROWS``."""
    from tests.support.vllm_cpu_layers import make_layer
    from ultraep_serve.engines.common.ways import Sample, is_exact, nanoseconds_of
    from ultraep_serve.engines.vllm.checks import has_amx
    from ultraep_serve.engines.vllm.cpu_experts import _run_kernel, ways_of

    amx = has_amx() and dtype is torch.bfloat16
    layer, _ = make_layer((EXPERTS, hidden, inner, TOP_K), dtype, amx=amx)
    alone, _ = make_layer((2 * EXPERTS, hidden, inner // 2, TOP_K), dtype, amx=amx)
    sample = Sample(EXPERTS, 2, TOP_K, hidden, dtype)
    for rows in ROWS:
        x, weights, local = sample.batch(rows)
        every = torch.randint(2 * EXPERTS, local.shape, dtype=torch.int32)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            way.name: partial(way.total, x, weights, local) for way in ways_of(layer)
        }
        if rows == ROWS[0]:
            for way in ways_of(layer):
                way.total(*sample.batch(1))  # compiled
        times = dict(zip(calls, nanoseconds_of(*calls.values()), strict=True))
        outputs = torch.empty_like(x)
        whole = partial(_run_kernel, alone, x, weights, every, outputs)
        (times["without EP"],) = nanoseconds_of(whole)
        yield {
            "dtype": str(dtype).removeprefix("torch."),
            "hidden": hidden,
            "inner": inner,
            "rows": rows,
            "ms": {name: round(taken / 1e6, 3) for name, taken in times.items()},
            "exact": {
                way.name: not way.sums and is_exact(way, (x, weights, local))
                for way in ways_of(layer)
                if rows > ROWS[0] and times[way.name] < 2e9
            },
        }


def measure_sums() -> Iterator[dict[str, Any]]:
    """A finding for each way and each of ``SUM_TOKENS``: milliseconds, and ratios of rounds."""
    from ultraep_kernels.host import combine

    from tests.support.vllm_cpu_layers import make_layer
    from ultraep_lab.bench.prefill import ratios_json
    from ultraep_serve.engines.common.ways import Sample
    from ultraep_serve.engines.vllm.checks import has_amx
    from ultraep_serve.engines.vllm.cpu_experts import ways_of

    (hidden, inner), dtype = SUM_SIZE, torch.bfloat16
    layer, _ = make_layer((EXPERTS, hidden, inner, TOP_K), dtype, amx=has_amx())
    skipped: list[str] = []
    for tokens in SUM_TOKENS:
        batch = Sample(EXPERTS, 2, TOP_K, hidden, dtype).batch(tokens * TOP_K // 2 // EXPERTS)
        for way in ways_of(layer):
            if way.sums or way.name in skipped:
                continue
            if min(once(partial(way.total, *batch)) for _ in range(2)) > HOPELESS_SECONDS:
                skipped.append(way.name)
                continue
            given, total = way.rows(*batch), torch.empty_like(batch[0])

            def now(given=given, total=total) -> torch.Tensor:
                return given.add_to(total)

            def by_torch(now=now) -> torch.Tensor:
                before, combine.MOST_THREADS = combine.MOST_THREADS, 0
                try:
                    return now()
                finally:
                    combine.MOST_THREADS = before

            assert torch.equal(now().clone(), by_torch())
            calls = {"layer": partial(way.total, *batch), "sums": now, "by torch": by_torch}
            rounds = [{name: once(call) for name, call in calls.items()} for _ in range(SUM_ROUNDS)]
            taken = {name: [each[name] for each in rounds] for name in calls}
            pairs = zip(taken["layer"], taken["sums"], taken["by torch"], strict=True)
            layers, sums, others = zip(*pairs, strict=True)
            ratio = partial(map, lambda above, below: above / below)
            yield {
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": tokens,
                "way": way.name,
                "ms": {
                    name: round(float(np.median(each)) * 1e3, 3) for name, each in taken.items()
                },
                "sums_over_layer": ratios_json(list(ratio(sums, layers))),
                "sums_over_torch": ratios_json(list(ratio(sums, others))),
            }


def once(call: Callable[[], object]) -> float:
    """Seconds that ``call`` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_here(name: str, sums: bool) -> None:
    """Print a finding a line, as JSON, for the instruction set ``name``."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for finding in measure_sums() if sums else measure_layers():
            print(json.dumps({"instructions": name, **finding}), flush=True)


def measure_layers() -> Iterator[dict[str, Any]]:
    """Findings for all types and sizes."""
    for dtype in (torch.bfloat16, torch.float32):
        for hidden, inner in SIZES:
            yield from measure_layer(hidden, inner, dtype)


def measure_with(name: str, *flags: str) -> Iterator[dict[str, Any]]:
    """Findings of a process that sees the instruction set ``name``."""
    environment = {**os.environ, **allocator(), "PYTHONWARNINGS": _WARNINGS, PLAYED: name}
    if name != own():
        environment.update(zip(_VARIABLES, SWITCHES[name], strict=True))
        environment["NUMBA_CPU_NAME"] = PROCESSORS[name]
    command = [sys.executable, __file__, "--here", name, *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"measuring {name} ended with {child.returncode}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--sums", action="store_true", help="weighting and adding up alone")
    parser.add_argument("--own", action="store_true", help="play no other instructions")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure_here(arguments.here, arguments.sums)
        return
    names = list(INSTRUCTION_SETS)
    findings = []
    last = names.index(own())
    for name in names[last if arguments.own else 0 : last + 1]:
        for finding in measure_with(name, *(["--sums"] if arguments.sums else [])):
            print(finding, flush=True)
            findings.append(finding)
    name = "expert-sums.json" if arguments.sums else "expert-kernels.json"
    path = Path(__file__).parent / "results" / name
    harness.write(arguments.json or path, {"findings": findings})


if __name__ == "__main__":
    main()
