"""What an engine stands on: its libraries load, some operators, and NCCL between two processes.

libraries.py FOUND                              the following, and what needs no second process
libraries.py FOUND RANK FOLDER                  a rank of the all-reduce
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1] / "device")]

import torch  # noqa: E402
from report import EMULATED, Report  # noqa: E402

from tests.support.launches import host_microseconds_per_layer  # noqa: E402

MODULES = {
    "triton": ("triton", "ultraep_kernels.device.plan"),
    "vllm": ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn"),
    "sglang": ("sgl_kernel", "sglang.srt.layers.moe.topk"),
}
TOKENS, HIDDEN, EXPERTS, TOP_K, BLOCK = 512, 1024, 64, 8, 16
ELEMENTS, REPETITIONS, SECONDS = 1 << 20, 20, 60
LARGEST_ERROR = 2e-2  # relative, in bfloat16


def main() -> None:
    """One row per library and operator."""
    report = Report(Path(sys.argv[1]))
    for library in MODULES:
        if find_spec(library):
            report.run(f"{library} loads", load, library)
    if find_spec("vllm"):
        from vllm.plugins import load_general_plugins

        load_general_plugins()  # as vLLM does wherever it runs
        for operator in (silu_and_mul, rms_norm, topk_softmax, moe_align_block_size):
            report.run(f"vllm's {operator.__name__}", operator)
    if EMULATED:  # on a GPU the part "device" says so
        report.run("the host's part of a layer, us", host_microseconds_per_layer)
    report.run("all-reduce of two processes", all_reduce_apart)
    sys.exit(not report.all_passed)


def load(library: str) -> dict[str, Any]:
    """Import what is compiled of it."""
    for module in MODULES[library]:
        importlib.import_module(module)
    return {"version": version(library)}


def silu_and_mul() -> dict[str, Any]:
    """Against torch."""
    x = random(TOKENS, 2 * HIDDEN)
    found = torch.empty((TOKENS, HIDDEN), dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(found, x)
    gate, up = x.double().chunk(2, dim=-1)
    return compared(found, torch.nn.functional.silu(gate) * up)


def rms_norm() -> dict[str, Any]:
    """Against torch."""
    x, weight = random(TOKENS, HIDDEN), random(HIDDEN)
    found = torch.empty_like(x)
    torch.ops._C.rms_norm(found, x, weight, 1e-6)
    scale = x.double().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
    return compared(found, x.double() * scale * weight.double())


def topk_softmax() -> dict[str, Any]:
    """Against torch: which experts, of two alike the lower number, and their weights."""
    from vllm import _custom_ops

    scores = random(TOKENS, EXPERTS).float()
    weights = torch.empty((TOKENS, TOP_K), device=scores.device)
    ids, rows = (torch.empty_like(weights, dtype=torch.int32) for _ in range(2))
    _custom_ops.topk_softmax(weights, ids, rows, scores, False)
    expected = scores.softmax(-1).sort(descending=True, stable=True)
    assert torch.equal(ids.long(), expected.indices[:, :TOP_K]), "other experts"
    return compared(weights, expected.values[:, :TOP_K])


def moe_align_block_size() -> dict[str, Any]:
    """Every assignment is in a block of its expert, once."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    ids = random(TOKENS, EXPERTS).topk(TOP_K).indices.int()
    rows, experts, padded = moe_align_block_size(ids, BLOCK, EXPERTS)
    rows = rows[: int(padded)].view(-1, BLOCK)
    real = rows < ids.numel()
    assert torch.equal(rows[real].sort().values, torch.arange(ids.numel(), device=ids.device))
    of_block = experts[: len(rows), None].expand_as(rows)
    assert torch.equal(ids.view(-1)[rows[real].long()], of_block[real]), "in another's block"
    return {"checked": "all assignments"}


def random(*shape: int) -> torch.Tensor:
    """bfloat16 on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def compared(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """By the largest error, relative to the largest value."""
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    assert error <= LARGEST_ERROR, f"{error = :.1e}"
    return {"largest_error": error}


def all_reduce_apart() -> dict[str, Any]:
    """What everything with an engine depends on: NCCL takes two processes, also on one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, __file__, sys.argv[1], str(rank), folder])
            for rank in range(2)
        ]
        end = time.monotonic() + SECONDS
        try:
            codes = [rank.wait(max(1, end - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        microseconds, total = map(float, Path(folder, "found").read_text().split())
    assert total == 3.0, f"1 + 2 = {total}"
    gpus = torch.cuda.device_count()
    return {"gpus": min(gpus, 2), "megabytes": ELEMENTS * 4 / 1e6, "microseconds": microseconds}


def all_reduce(rank: int, folder: Path) -> None:
    """One rank's; the first writes what came of it."""
    import torch.distributed as dist

    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    x = torch.full((ELEMENTS,), rank + 1.0).cuda()
    dist.all_reduce(x)
    total = float(x[-1])
    began = time.monotonic()
    for _ in range(REPETITIONS):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    seconds = (time.monotonic() - began) / REPETITIONS
    if rank == 0:
        (folder / "found").write_text(f"{seconds * 1e6} {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        all_reduce(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
