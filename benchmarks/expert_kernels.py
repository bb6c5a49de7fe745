"""How long each way of computing experts takes on this CPU, and with fewer of its instructions.

    python benchmarks/expert_kernels.py

One thread of one of two ranks computes its half of a layer's experts (vLLM). "without EP" is what
the engine alone has to compute: all experts with half of their inner size, summed in its kernel. A
way is exact if what an expert gives for a token does not depend on the tokens beside it. Fewer
instructions are played: libraries are told to leave them, and vLLM takes its build without them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import torch

from tests.support.instruction_sets import INSTRUCTION_SETS, PLAYED, own

ROWS = (4, 64, 512)  # of an expert
EXPERTS, TOP_K = 8, 4  # of the rank, which has half of the layer's
SIZES = ((1024, 512), (2048, 768))  # H, I
SWITCHES = {  # of oneDNN, ATen and MKL
    "AVX2": ("AVX2", "avx2", "AVX2"),
    "AVX512": ("AVX512_CORE", "avx512", "AVX512"),
}
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
_WARNINGS = "ignore"  # torch's own, when vLLM has it compile


def measure_layer(hidden: int, inner: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A finding for each of ``ROWS``."""
    from tests.support.vllm_cpu_layers import make_layer
    from ultraep_serve.engines.common.ways import Sample, is_exact, nanoseconds_of
    from ultraep_serve.engines.vllm.cpu_experts import ways_of

    layer, _ = make_layer((EXPERTS, hidden, inner, TOP_K), dtype)
    alone, _ = make_layer((2 * EXPERTS, hidden, inner // 2, TOP_K), dtype)
    (summing,) = (way for way in ways_of(alone) if way.sums)
    sample = Sample(EXPERTS, 2, TOP_K, hidden, dtype)
    for rows in ROWS:
        x, weights, local = sample.batch(rows)
        every = torch.randint(2 * EXPERTS, local.shape, dtype=torch.int32)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            way.name: partial(way.total, x, weights, local) for way in ways_of(layer)
        }
        times = {name: nanoseconds_of(call) for name, call in calls.items()}
        times["without EP"] = nanoseconds_of(partial(summing.total, x, weights, every))
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


def measure_here(name: str) -> None:
    """Print a finding a line, as JSON, for the instruction set ``name``."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for hidden, inner in SIZES:
                for finding in measure_layer(hidden, inner, dtype):
                    print(json.dumps({"instructions": name, **finding}), flush=True)


def measure_with(name: str) -> Iterator[dict[str, Any]]:
    """Findings of a process that sees the instruction set ``name``."""
    environment = {**os.environ, "PYTHONWARNINGS": _WARNINGS, PLAYED: name}
    if name != own():
        environment.update(zip(_VARIABLES, SWITCHES[name], strict=True))
    command = [sys.executable, __file__, "--here", name]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"measuring {name} ended with {child.returncode}")


def main() -> None:
    parser = harness.parser(__doc__, "expert-kernels.json")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        measure_here(arguments.here)
        return
    names = list(INSTRUCTION_SETS)
    findings = []
    for name in names[: names.index(own()) + 1]:
        for finding in measure_with(name):
            print(finding, flush=True)
            findings.append(finding)
    harness.write(arguments.json, {"findings": findings})


if __name__ == "__main__":
    main()
