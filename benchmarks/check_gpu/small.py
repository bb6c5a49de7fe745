"""A small batch through every kernel of a layer, for tools under which all is slow.

small.py FOUND [--global-sanitizer]

Without CUDA graphs and in one stream: Triton's global sanitizer knows no order between streams, and
memcheck sees the ends of tensors only where torch does not keep freed memory, which graphs need.
With the sanitizer, a kernel that races comes first, in a process of its own: it must be found.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["ULTRAEP_BENCH_PLAIN"] = "1"  # read by tests.support.bench
WITH_SANITIZER = "--global-sanitizer" in sys.argv
RACES = "--race" in sys.argv
if WITH_SANITIZER:
    os.environ["TRITON_INSTRUMENTATION_MODE"] = "gsan"
elif os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import checks  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from parts import CHECKS_OF_KERNELS  # noqa: E402
from report import Report  # noqa: E402
from routes import make_routes  # noqa: E402
from virtual_layer import Work, balance, check_outputs, make_layer  # noqa: E402

from tests.support.bench import Bench  # noqa: E402
from ultraep_serve.balance.physical import identity_table, master_ids  # noqa: E402
from ultraep_serve.types import ExpertShape  # noqa: E402

SHAPE, HIDDEN, INNER, TOKENS, TOP_K = ExpertShape(4, 16, 2), 128, 64, 96, 2


def main() -> None:
    """Rows to the file that is named first."""
    report, bench = Report(Path(sys.argv[1])), Bench()
    if RACES:
        race(bench.device)
        return
    if WITH_SANITIZER:
        report.run("a race is found", a_race_is_found, sys.argv[1])
        from triton.experimental import gsan

        with torch.cuda.use_mem_pool(gsan.create_mem_pool()):
            check(bench, report)
    else:
        check(bench, report)
    sys.exit(not report.all_passed)


def check(bench: Bench, report: Report) -> None:
    """A layer of virtual ranks; on a GPU also the tests' own checks of each kernel."""
    report.run("layer", check_layer, bench)
    if not bench.interpreted:
        torch.cuda.synchronize()
        checks.run(bench, report, *CHECKS_OF_KERNELS)
        torch.cuda.synchronize()


def check_layer(bench: Bench) -> dict[str, Any]:
    """Count, plan, reroute, send and receive of all ranks, and a grouped product on the slots."""
    layer = make_layer(SHAPE, HIDDEN, INNER, TOKENS, TOP_K, bench.device)
    routes = make_routes(SHAPE, TOKENS, TOP_K, 1.5, bench.device)
    balanced = balance(bench, layer.ranks, routes.ids)
    ids = routes.ids.view(-1, TOP_K)
    places = SHAPE.num_logical_experts, SHAPE.num_ranks, SHAPE.num_replica_slots
    table = torch.from_numpy(identity_table(*places)).to(bench.device)
    works = Work.of(master_ids(ids, table), SHAPE), Work.of(balanced.physical, SHAPE)
    return {"checked": "outputs per token", **check_outputs(layer, ids, *works, 32)}


def a_race_is_found(found: str) -> dict[str, Any]:
    """A sanitizer that reports nothing would prove nothing."""
    command = [sys.executable, __file__, found, "--global-sanitizer", "--race"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = (done.stdout + done.stderr).splitlines()[-3:]
    assert done.returncode != 0, f"it was not; {said = }"
    return {"said": said}


@triton.jit
def racing(word_ptr):
    """Store to a word."""
    tl.store(word_ptr, tl.program_id(0))


def race(device: torch.device) -> None:
    """All programs store to the same word, and none waits for another."""
    from triton.experimental import gsan

    with torch.cuda.use_mem_pool(gsan.create_mem_pool()):
        word = torch.zeros(1, dtype=torch.int32, device=device)
        racing[(64,)](word)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
