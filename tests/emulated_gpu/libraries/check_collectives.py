"""Collectives of three processes on the emulated GPU, against the same ones of Gloo on the CPU."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["check_collectives"]

RANKS, SECONDS = 3, 120
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8
ELEMENTS = 6 * RANKS


def check_collectives() -> dict[str, Any]:
    """Each collective and type, launched and in a CUDA graph. Raises where one differs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder]
        environment = os.environ | {"EMULATED_GPU_DEVICES": str(RANKS)}
        ranks = [subprocess.Popen([*command, str(n)], env=environment) for n in range(RANKS)]
        end = time.monotonic() + SECONDS
        try:
            codes = [rank.wait(max(1, end - time.monotonic())) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
    return {"ranks": RANKS, "collectives": len(COLLECTIVES), "types": len(DTYPES)}


Tensors = list[torch.Tensor]
Group = dist.ProcessGroup | None


def all_reduce(x: torch.Tensor, group: Group) -> Tensors:
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN]
    results = [x.clone() for _ in operations]
    for result, operation in zip(results, operations, strict=True):
        dist.all_reduce(result, operation, group)
    return results


def reduce_to_one(x: torch.Tensor, group: Group) -> Tensors:
    result = x.clone()
    dist.reduce(result, 1, group=group)
    return [result] if dist.get_rank() == 1 else []


def reduce_scatter(x: torch.Tensor, group: Group) -> Tensors:
    result = x.new_empty(len(x) // RANKS)
    dist.reduce_scatter_tensor(result, x, group=group)
    return [result]


def all_gather(x: torch.Tensor, group: Group) -> Tensors:
    result = x.new_empty(len(x) * RANKS)
    dist.all_gather_into_tensor(result, x, group=group)
    return [result]


def all_to_all(x: torch.Tensor, group: Group) -> Tensors:
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=group)
    return [result]


def uneven_all_to_all(x: torch.Tensor, group: Group) -> Tensors:
    """Rank r sends n + 1 elements to rank n."""
    sent, received = [n + 1 for n in range(RANKS)], [dist.get_rank() + 1] * RANKS
    result = x.new_empty(sum(received))
    dist.all_to_all_single(result, x[: sum(sent)], received, sent, group=group)
    return [result]


def broadcast(x: torch.Tensor, group: Group) -> Tensors:
    result = x.clone()
    dist.broadcast(result, 2, group=group)
    return [result]


COLLECTIVES: tuple[Callable[[torch.Tensor, Group], Tensors], ...] = (
    *(all_reduce, reduce_to_one, reduce_scatter, all_gather),
    *(all_to_all, uneven_all_to_all, broadcast),
)


def run_rank(folder: Path, rank: int) -> None:
    """Compare everything on one rank."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
    on_cpu = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(rank)
    for dtype in DTYPES:
        x = torch.randint(0, 40, (ELEMENTS,), generator=generator).to(dtype)
        for collective in COLLECTIVES:
            expected = collective(x, on_cpu)
            on_gpu, graph = x.cuda(), torch.cuda.CUDAGraph()
            require_same(collective(on_gpu, None), expected, collective, dtype)
            with torch.cuda.graph(graph):
                found = collective(on_gpu, None)
            for result in found:
                result.zero_()
            graph.replay()
            require_same(found, expected, collective, dtype)
    pair = torch.full((4,), float(rank), device="cuda")
    if rank == 0:
        dist.send(pair, 2)
    if rank == 2:
        dist.recv(pair, 0)
        assert not pair.any(), "a message is another's"
    dist.destroy_process_group()


def require_same(found: Tensors, expected: Tensors, what: Any, dtype: torch.dtype) -> None:
    """Small whole numbers are exact in every type."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other), f"{what.__name__} of {dtype}: {one}, not {other}"


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
