"""Accelerators by name: published peaks, and what share of them serving is assumed to achieve.

Peaks are dense (the data sheets' sparse figures halved) and per GPU; NVLink is one direction.
Sources: NVIDIA H100 Tensor Core GPU Datasheet (SXM), NVIDIA H200 Tensor Core GPU Datasheet (SXM),
NVIDIA GB200 NVL72 product page and datasheet (a superchip has two GPUs, a rack 72). Networks:
DGX H100, DGX H200 and GB200 NVL72 reference designs have one 400 Gb/s ConnectX-7 per GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ultraep_serve.errors import ConfigError

__all__ = ["HARDWARE", "Efficiency", "Hardware", "hardware"]


@dataclass(frozen=True)
class Efficiency:
    """Achieved over peak: assumptions, which measurements should replace."""

    matrix: float = 0.5  # grouped and dense GEMMs of prefill sizes
    attention: float = 0.5  # scores and values, of the BF16 peak
    memory: float = 0.8  # reading weights
    link: float = 0.79  # UltraEP's busiest link: 712 of 900 GB/s (arXiv 2606.04101)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise ConfigError(f"{name} efficiency = {value} is not legal; legal: above 0 to 1")


@dataclass(frozen=True)
class Hardware:
    """One GPU's peaks and its surroundings."""

    name: str
    bf16_flops: float  # per second, dense
    fp8_flops: float
    memory_bytes: int
    memory_bytes_per_second: float
    link_bytes_per_second: float  # NVLink, one direction
    network_bytes_per_second: float  # to other domains, one direction
    domain_size: int  # GPUs that NVLink joins
    source: str

    def flops(self, weight_type: str) -> float:
        """Peak for weights of a type; FP8 and smaller compute at the FP8 peak."""
        return self.bf16_flops if weight_type == "bf16" else self.fp8_flops


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "h100": Hardware(
            name="h100",
            bf16_flops=989.5e12,
            fp8_flops=1979e12,
            memory_bytes=80 * 10**9,
            memory_bytes_per_second=3.35e12,
            link_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            domain_size=8,
            source="NVIDIA H100 Tensor Core GPU Datasheet, H100 SXM",
        ),
        "h200": Hardware(
            name="h200",
            bf16_flops=989.5e12,
            fp8_flops=1979e12,
            memory_bytes=141 * 10**9,
            memory_bytes_per_second=4.8e12,
            link_bytes_per_second=450e9,
            network_bytes_per_second=50e9,
            domain_size=8,
            source="NVIDIA H200 Tensor Core GPU Datasheet, H200 SXM",
        ),
        "gb200": Hardware(
            name="gb200",
            bf16_flops=2500e12,
            fp8_flops=5000e12,
            memory_bytes=186 * 10**9,
            memory_bytes_per_second=8e12,
            link_bytes_per_second=900e9,
            network_bytes_per_second=50e9,
            domain_size=72,
            source="NVIDIA GB200 NVL72 Datasheet, per GPU",
        ),
    }
)


def hardware(name: str) -> Hardware:
    """Hardware by name. Raises ConfigError naming the known ones."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise ConfigError(f"unknown hardware {name!r}; known: {', '.join(HARDWARE)}") from None
