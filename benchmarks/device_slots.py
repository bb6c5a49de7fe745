"""Replica slots and rank-to-rank memory on one GPU: is what unit tests assume of CUDA true?

    python benchmarks/device_slots.py --json benchmarks/results/device_slots.json   # with a GPU
    python benchmarks/device_slots.py --dry-run                                     # any machine

Adopts the experts of two layers, feeds the aliased tensors to ``torch._grouped_mm``, writes through
one layer's alias and reads through the other's, and lets several processes share the GPU: they push
experts into each other's slots through imported memory, and one of them dies. Exits with 1 if any
check failed. A dry run does the same with tiny experts in host memory, under Triton's interpreter,
and says nothing about GPUs.
"""

import argparse
import json
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton

from ultraep_serve.cuda.driver import Driver, open_driver
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.meeting import SocketMeeting
from ultraep_serve.cuda.slots import ALIGNMENT, DeviceSlotPool
from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.slots import LayerSlots
from ultraep_serve.testing.host_driver import HostDriver
from ultraep_serve.testing.interpreter import restart_interpreted
from ultraep_serve.testing.ranks import fresh_run_path, run_ranks

LAYERS, SLOTS, WIDTH = 2, 2, 64


@dataclass(frozen=True)
class Sizes:
    """What is checked with."""

    dry_run: bool
    masters: int  # L
    hidden: int
    intermediate: int
    tokens: int  # of one expert
    chunk_bytes: int
    epochs: int
    max_looks: int

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """One expert: both weights, FP8 block scales, a bias whose masters would not be aligned."""
        return {
            "w13": ((2 * self.intermediate, self.hidden), torch.bfloat16),
            "w2": ((self.hidden, self.intermediate), torch.bfloat16),
            "scale": ((2 * self.intermediate // 16, self.hidden // 16), torch.float32),
            "bias": ((3,), torch.bfloat16),
        }


# experts of Qwen3-235B as 8 of 128 lie on a rank of 16
FULL = Sizes(False, 8, 4096, 1536, 256, 1 << 20, 20, 50_000_000)
TINY = Sizes(True, 2, 128, 128, 4, 1 << 13, 2, 2_000_000)


@dataclass
class Report:
    """Everything that is written out."""

    command: list[str]
    dry_run: bool
    versions: dict[str, str | None]
    checks: list[dict[str, Any]] = field(default_factory=list)

    def run(self, what: str, check: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Make one check; whatever it raises is its result."""
        try:
            result = {"passed": True, **check(*arguments)}
        except Exception as error:
            traceback.print_exc()
            result = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        self.checks.append({"what": what, **result})
        print("ok    " if result["passed"] else "FAILED", what, result)


def main() -> None:
    """Make all checks; a dry run starts itself again under the interpreter."""
    args = parse_arguments()
    if args.dry_run:
        restart_interpreted()
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was checked; --dry-run plays it in host memory")
    sizes = TINY if args.dry_run else FULL
    report = Report(sys.argv, args.dry_run, versions(args.dry_run))
    report.run("slots behind masters", check_slots, sizes)
    for num_ranks, relay in ((2, "never"), (4, "always")):
        what = f"{num_ranks} processes on one device, relays {relay}"
        report.run(what, check_processes, sizes, num_ranks, relay)
    report.run("a process dies", check_death, sizes)
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    sys.exit(not all(check["passed"] for check in report.checks))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="no GPU: host memory, tiny sizes")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def versions(dry_run: bool) -> dict[str, str | None]:
    """What the checks were made with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "device": None if dry_run else torch.cuda.get_device_name(),
    }


def open_device(sizes: Sizes) -> Driver:
    """The GPU's driver, or what plays it."""
    return HostDriver() if sizes.dry_run else open_driver(0)


def masters_of(sizes: Sizes, device: torch.device, seed: int) -> list[torch.Tensor]:
    """One layer's masters (L, ...), always the same for a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn((sizes.masters, *shape), generator=generator, device=device).to(dtype)
        for shape, dtype in sizes.shapes.values()
    ]


def check_slots(sizes: Sizes) -> dict[str, Any]:
    """One process: adoption, aliases, and an unmodified grouped GEMM over them."""
    driver = open_device(sizes)
    pool = DeviceSlotPool(driver, SLOTS, sizes.chunk_bytes)
    layers, used = [], []
    for seed in range(LAYERS):
        masters = masters_of(sizes, driver.device, seed)
        before = free_bytes(driver)
        layers.append(pool.adopt(masters))
        used.append(before - free_bytes(driver))
        expected = masters_of(sizes, driver.device, seed)
        for alias, master in zip(layers[-1].tensors, expected, strict=True):
            assert alias.data_ptr() % ALIGNMENT == 0, "not aligned"
            assert torch.equal(alias[: sizes.masters], master), "masters changed"
    require_aliases(sizes, layers)
    for expert in range(sizes.masters):
        for alias in layers[0].tensors:
            alias[sizes.masters + 1].copy_(alias[expert])
        require_equal_products(sizes, layers[0], expert, sizes.masters + 1)
    expert_bytes = int(layers[0].expert_bytes.sum())
    result = {
        "granularity": driver.granularity,
        "expert_bytes": expert_bytes,
        "pool_bytes": pool.size,
        "memory_used_by_layer": used,  # the first one's holds the pool
    }
    pool.close()
    return result


def require_aliases(sizes: Sizes, layers: list[LayerSlots]) -> None:
    """What is written through one layer's slots of weights is read through the other's."""
    for tensor in range(2):
        one, other = (layer.tensors[tensor] for layer in layers)
        for slot in range(sizes.masters, sizes.masters + SLOTS):
            one[slot].fill_(slot)
            assert (other[slot] == slot).all(), "not the same memory"
            other[slot].fill_(-slot)
            assert (one[slot] == -slot).all(), "not the same memory"


def require_equal_products(sizes: Sizes, layer: LayerSlots, one: int, other: int) -> None:
    """An unmodified grouped GEMM gives the same bits for equal experts at two places."""
    for weight in layer.tensors[:2]:
        generator = torch.Generator(weight.device).manual_seed(1)
        shape = (sizes.tokens, weight.shape[2])
        x = torch.randn(shape, generator=generator, device=weight.device).bfloat16()
        ends = torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.device)
        products = []
        for expert in (one, other):
            ends[:expert], ends[expert:] = 0, sizes.tokens
            products.append(torch._grouped_mm(x, weight.transpose(1, 2), offs=ends))
        assert torch.equal(*products), "products differ"
        exact = x.double() @ weight[one].double().T
        error = (products[1].double() - exact).norm() / exact.norm()
        assert error < 1e-2, f"relative error {error:.1e}"


def free_bytes(driver: Driver) -> int:
    """Memory that the device has left."""
    if driver.device.type != "cuda":
        return 0
    driver.reclaim()
    return torch.cuda.mem_get_info(driver.device)[0]


def check_processes(sizes: Sizes, num_ranks: int, relay: str) -> dict[str, Any]:
    """Several processes on one device fill each other's slots."""
    with fresh_run_path() as run_path:
        arguments = num_ranks, run_path, sizes, relay
        filled = run_ranks(fill_each_other, num_ranks, *arguments, timeout_seconds=240.0)
    assert min(filled) > 0
    return {"slots_filled_by_rank": filled}


def fill_each_other(rank: int, num_ranks: int, run_path: Path, sizes: Sizes, relay: str) -> int:
    """Slots that were filled over all epochs, every one of them right; a process of its own."""
    driver, pool, layers, fabric = join(rank, num_ranks, run_path, sizes)
    tables = [fabric.tables(layer) for layer in layers]
    filled = 0
    for epoch in range(sizes.epochs):
        index = epoch % LAYERS
        row = torch.arange(WIDTH, dtype=torch.int32, device=driver.device) + epoch
        rows = fabric.exchange(row + 1000 * rank)
        expected = 1000 * torch.arange(num_ranks, dtype=torch.int32, device=driver.device)
        slot_expert = slots_of(num_ranks, sizes.masters, epoch)
        on_device = slot_expert.to(driver.device)
        fabric.stream(tables[index], on_device, sizes.masters, relay)
        fabric.wait_slots(tables[index], on_device)
        for slot, expert in enumerate(slot_expert[rank].tolist()):
            owner, local = divmod(expert, sizes.masters)
            theirs = masters_of(sizes, driver.device, LAYERS * owner + index)
            for alias, master in zip(layers[index].tensors, theirs, strict=True):
                assert torch.equal(alias[sizes.masters + slot], master[local]), "wrong bytes"
            filled += 1
        assert torch.equal(rows, row + expected[:, None]), "wrong rows"
        fabric.require_peers()
    fabric.exchange(torch.zeros(WIDTH, dtype=torch.int32, device=driver.device))
    fabric.close()
    pool.close()
    return filled


def join(
    rank: int, num_ranks: int, run_path: Path, sizes: Sizes
) -> tuple[Driver, DeviceSlotPool, list[LayerSlots], DeviceFabric]:
    """One rank with two layers, once all ranks have met."""
    driver = open_device(sizes)
    pool = DeviceSlotPool(driver, SLOTS, sizes.chunk_bytes)
    layers = [
        pool.adopt(masters_of(sizes, driver.device, LAYERS * rank + layer))
        for layer in range(LAYERS)
    ]
    max_chunks, num_programs = layers[0].chunks.shape[0], 2 if sizes.dry_run else 16
    limits = Limits(WIDTH, max_chunks, sizes.max_looks, num_programs)
    meeting = SocketMeeting(run_path, rank, num_ranks, 120.0)
    return driver, pool, layers, DeviceFabric(driver, pool, meeting, rank, num_ranks, limits)


def slots_of(num_ranks: int, masters: int, epoch: int) -> torch.Tensor:
    """(R, S): an expert of one rank on all others, so that relays have work, and a neighbour's."""
    ranks = torch.arange(num_ranks)
    hot = epoch % num_ranks * masters
    next_rank, after_next = (ranks + 1) % num_ranks, (ranks + 2) % num_ranks
    first = torch.where(ranks == epoch % num_ranks, next_rank * masters, hot)
    other = torch.where(after_next == ranks, next_rank, after_next)
    return torch.stack([first, other * masters + masters - 1], dim=1).int()


def check_death(sizes: Sizes) -> dict[str, Any]:
    """One of two processes ends; the other's wait ends in an error."""
    with fresh_run_path() as run_path:
        told, _ = run_ranks(outlive, 2, run_path, sizes, timeout_seconds=120.0)
    assert "gave up waiting" in told, told
    return {"told": told}


def outlive(rank: int, run_path: Path, sizes: Sizes) -> str:
    """What rank 0 is told after rank 1 has ended without a word."""
    driver, _, _, fabric = join(rank, 2, run_path, sizes)
    if rank == 0:
        fabric.limits = Limits(**{**asdict(fabric.limits), "max_looks": 10_000})
        fabric.exchange(torch.zeros(WIDTH, dtype=torch.int32, device=driver.device))
        try:
            fabric.require_peers()
        except PeerTimeoutError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    main()
