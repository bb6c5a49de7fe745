"""Replica slots behind masters on one GPU: is what unit tests assume of CUDA true?

Adopts the experts of two layers, feeds the aliased tensors to ``torch._grouped_mm``, writes through
one layer's alias and reads through the other's.
"""

from dataclasses import dataclass
from typing import Any

import torch
from bench import Bench
from report import Report, require

from ultraep_serve.backend import LayerSlots
from ultraep_serve.cuda.driver import Driver
from ultraep_serve.cuda.slots import ALIGNMENT, DeviceSlotPool

LAYERS, SLOTS = 2, 2


@dataclass(frozen=True)
class Sizes:
    """What is checked with."""

    masters: int  # L
    hidden: int
    intermediate: int
    tokens: int  # of one expert
    chunk_bytes: int

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """One expert: both weights, FP8 block scales, a bias whose masters would not be aligned."""
        return {
            "w13": ((2 * self.intermediate, self.hidden), torch.bfloat16),
            "w2": ((self.hidden, self.intermediate), torch.bfloat16),
            "scale": ((2 * self.intermediate // 16, self.hidden // 16), torch.float32),
            "bias": ((3,), torch.bfloat16),
        }


FULL = Sizes(8, 4096, 1536, 256, 1 << 20)  # of Qwen3-235B as 8 of 128 lie on a rank of 16
TINY = Sizes(2, 128, 128, 4, 1 << 13)


def run(bench: Bench, report: Report) -> None:
    """One process alone."""
    report.run("slots behind masters", check_slots, bench, TINY if bench.dry_run else FULL)


def masters_of(sizes: Sizes, device: torch.device, seed: int) -> list[torch.Tensor]:
    """One layer's masters (L, ...), always the same for a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn((sizes.masters, *shape), generator=generator, device=device).to(dtype)
        for shape, dtype in sizes.shapes.values()
    ]


def check_slots(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """Adoption, aliases, and an unmodified grouped GEMM over them."""
    driver = bench.driver()
    pool = DeviceSlotPool(driver, SLOTS, sizes.chunk_bytes)
    layers, used = [], []
    for seed in range(LAYERS):
        masters = masters_of(sizes, driver.device, seed)
        before = free_bytes(driver)
        layers.append(pool.adopt(masters))
        used.append(before - free_bytes(driver))
        expected = masters_of(sizes, driver.device, seed)
        for alias, master in zip(layers[-1].tensors, expected, strict=True):
            require(alias.data_ptr() % ALIGNMENT == 0, "not aligned")
            require(torch.equal(alias[: sizes.masters], master), "masters changed")
    require_aliases(sizes, layers)
    for expert in range(sizes.masters):
        for alias in layers[0].tensors:
            alias[sizes.masters + 1].copy_(alias[expert])
        require_equal_products(sizes, layers[0], expert, sizes.masters + 1)
    expert_bytes = int(layers[0].expert_bytes.sum())
    result = {
        "checked": "masters, aliases and products",
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
            require((other[slot] == slot).all(), "not the same memory")
            other[slot].fill_(-slot)
            require((one[slot] == -slot).all(), "not the same memory")


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
        require(torch.equal(*products), "products differ")
        exact = x.double() @ weight[one].double().T
        error = (products[1].double() - exact).norm() / exact.norm()
        require(error < 1e-2, f"relative error {error:.1e}")


def free_bytes(driver: Driver) -> int:
    """Memory that the device has left."""
    if driver.device.type != "cuda":
        return 0
    driver.reclaim()
    return torch.cuda.mem_get_info(driver.device)[0]
