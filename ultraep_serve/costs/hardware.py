"""Accelerators by name: published peaks, and the share of them that serving is assumed to reach.

Measured rates of operators (``operator_rates``) can take the place of both.

Peaks are dense (the data sheets' sparse figures halved) and per GPU; NVLink is one direction.
Sources: NVIDIA H100 Tensor Core GPU Datasheet (SXM), NVIDIA H200 Tensor Core GPU Datasheet (SXM),
NVIDIA GB200 NVL72 product page and datasheet (a superchip has two GPUs, a rack 72). Networks:
DGX H100, DGX H200 and GB200 NVL72 reference designs have one 400 Gb/s ConnectX-7 per GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ultraep_serve.costs.model import CostModel
from ultraep_serve.costs.operator_rates import RATE_NAMES, MeasuredRates, Rates
from ultraep_serve.costs.shapes import ModelShape, weight_bits
from ultraep_serve.errors import ConfigError

__all__ = [
    "HARDWARE",
    "Efficiency",
    "Estimate",
    "Hardware",
    "custom_estimate",
    "estimate_costs",
    "hardware",
]


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
                raise ConfigError(f"{name} efficiency = {value} must be above 0 and at most 1")


@dataclass(frozen=True)
class Hardware:
    """One GPU's peaks and its surroundings."""

    bf16_flops: float  # per second, dense
    fp8_flops: float
    memory_bytes_per_second: float
    link_bytes_per_second: float  # NVLink, one direction
    network_bytes_per_second: float  # to other domains, one direction
    domain_size: int  # GPUs that NVLink joins
    source: str

    def flops(self, weight_type: str) -> float:
        """Peak for weights of a type; FP8 and smaller compute at the FP8 peak."""
        return self.bf16_flops if weight_type == "bf16" else self.fp8_flops

    def rates(self, weight_type: str, share: Efficiency) -> Rates:
        """``share`` of the peaks."""
        return Rates(
            expert_flops=self.flops(weight_type) * share.matrix,
            dense_flops=self.flops(weight_type) * share.matrix,
            attention_flops=self.bf16_flops * share.attention,
            memory_bytes_per_second=self.memory_bytes_per_second * share.memory,
            dispatch_bytes_per_second=self.link_bytes_per_second * share.link,
        )


_H100 = Hardware(
    bf16_flops=989.5e12,
    fp8_flops=1979e12,
    memory_bytes_per_second=3.35e12,
    link_bytes_per_second=450e9,
    network_bytes_per_second=50e9,
    domain_size=8,
    source="NVIDIA H100 Tensor Core GPU Datasheet, H100 SXM",
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "h100": _H100,
        "h200": replace(
            _H100,
            memory_bytes_per_second=4.8e12,
            source="NVIDIA H200 Tensor Core GPU Datasheet, H200 SXM",
        ),
        "gb200": Hardware(
            bf16_flops=2500e12,
            fp8_flops=5000e12,
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
        raise ConfigError(f"unknown hardware {name!r}; choose from {', '.join(HARDWARE)}") from None


# Published by UltraEP for EP64 with 256 experts: plan 72 us, reroute 37 us (arXiv 2606.04101).
PLAN_AND_REROUTE_SECONDS = 109e-6
EXCHANGE_SECONDS = 20e-6  # assumed: one small all-gather inside an NVLink domain
BASE_SECONDS = 100e-6  # assumed: launches of a layer, latency of dispatch and combine
COMBINE_BYTES = 2  # of one activation, BF16


@dataclass(frozen=True)
class Estimate:
    """Costs of one MoE layer, and of the dense layers of the same model."""

    costs: CostModel
    dense_seconds_per_token: float  # of a dense layer, per token of a rank
    assumptions: list[str] = field(default_factory=list)


def estimate_costs(
    shape: ModelShape,
    hardware: Hardware,
    *,
    num_ranks: int,
    weight_type: str = "bf16",
    context_tokens: int = 4096,
    domain_size: int | None = None,
    efficiency: Efficiency | None = None,
    measured: MeasuredRates | None = None,
) -> Estimate:
    """Costs per rank where attention is data parallel and experts are spread over all ranks.

    Args:
        shape: the model.
        hardware: peaks per GPU.
        num_ranks: R.
        weight_type: of experts and projections: bf16, fp8, fp4. FP4 computes at the FP8 peak.
        context_tokens: prompt length; each token sees half of it on average (causal).
        domain_size: ranks that NVLink joins; by default the hardware's.
        efficiency: achieved over peak.
        measured: rates that take the place of peaks and efficiency.

    Raises:
        ConfigError: ``weight_type`` is not known.
    """
    share = efficiency or Efficiency()
    domain = min(domain_size or hardware.domain_size, num_ranks)
    rates = hardware.rates(weight_type, share)
    rates = replace(rates, **measured.rates) if measured else rates
    link = hardware.link_bytes_per_second * share.link
    dispatched = COMBINE_BYTES + (COMBINE_BYTES if weight_type == "bf16" else 1)
    scores = shape.score_flops * context_tokens / 2 / rates.attention_flops
    network = (
        shape.hidden_size
        * dispatched
        * remote_domains(shape.experts_per_token, num_ranks, domain)
        / (hardware.network_bytes_per_second * share.link)
    )
    expert_bytes = shape.expert_bytes(weight_type)
    costs = CostModel(
        seconds_per_assignment=shape.expert_flops / rates.expert_flops
        + shape.hidden_size * dispatched / rates.dispatch_bytes_per_second,
        bytes_per_expert=expert_bytes,
        link_bytes_per_second=link,
        exchange_seconds=EXCHANGE_SECONDS,
        plan_seconds=PLAN_AND_REROUTE_SECONDS,
        base_seconds=BASE_SECONDS,
        other_seconds_per_token=shape.shared_flops / rates.dense_flops + scores + network,
        read_seconds_per_expert=expert_bytes / rates.memory_bytes_per_second,
    )
    dense = shape.dense_flops / rates.dense_flops + scores
    assumptions = _assumptions(hardware, share, weight_type, context_tokens, num_ranks, domain)
    if measured:
        assumptions.insert(0, _measured_line(measured))
    return Estimate(costs, dense, assumptions)


def custom_estimate(shape: ModelShape, costs: CostModel, origin: str) -> Estimate:
    """Given or measured costs; dense layers compute at the rate of experts."""
    dense = costs.seconds_per_assignment * shape.dense_flops / shape.expert_flops
    return Estimate(costs, dense, [f"costs as given in {origin}"])


def remote_domains(experts_per_token: int, num_ranks: int, domain_size: int) -> float:
    """Mean number of other domains that a token is sent to, if experts are chosen evenly.

    Dispatch sends a token to a domain once, however many of its experts are there, so this does
    not depend on which rank is busy.
    """
    num_domains = -(-num_ranks // domain_size)
    reached = num_domains * (1 - (1 - 1 / num_domains) ** experts_per_token)
    return reached * (num_domains - 1) / num_domains


def _measured_line(measured: MeasuredRates) -> str:
    """Which rates were measured, by whom; the next line holds for the others."""
    values = ", ".join(f"{name} {value:.3g}" for name, value in measured.rates.items())
    line = f"measured per second, in place of the peaks below ({measured.source}): {values}"
    others = [name for name in RATE_NAMES if name not in measured.rates]
    return f"{line}; not measured: {', '.join(['links of moved experts', *others])}"


def _assumptions(
    hardware: Hardware,
    share: Efficiency,
    weight_type: str,
    context_tokens: int,
    num_ranks: int,
    domain: int,
) -> list[str]:
    lines = [
        f"peaks from {hardware.source}; achieved: {share.matrix:.0%} of "
        f"{hardware.flops(weight_type) / 1e12:.0f} TFLOPS ({weight_bits(weight_type):.4g} bits per "
        f"weight), {share.memory:.0%} of memory, {share.link:.0%} of NVLink bandwidth",
        f"attention is data parallel, prompts have {context_tokens} tokens",
        "dispatch, expert computation and combine follow each other, and dispatch and combine take "
        "as long as the busiest rank's tokens need on its link",
        f"per layer {BASE_SECONDS * 1e6:.0f} us of launches and latency (assumed); where balanced "
        f"{PLAN_AND_REROUTE_SECONDS * 1e6:.0f} us to plan and reroute (published by UltraEP), "
        f"{EXCHANGE_SECONDS * 1e6:.0f} us to exchange loads (assumed); transfers do not overlap",
    ]
    if domain < num_ranks:
        lines.append(
            f"{domain} ranks per NVLink domain; each token crosses the network "
            f"({hardware.network_bytes_per_second / 1e9:.0f} GB/s per rank) once per other domain"
        )
    return lines
