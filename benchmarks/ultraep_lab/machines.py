"""Accelerators and models by name, and from their data sheets the costs of a MoE layer.

Peaks are dense (the data sheets' sparse figures halved) and per GPU; NVLink is one direction.
Sources: NVIDIA H100 Tensor Core GPU Datasheet (SXM), NVIDIA H200 Tensor Core GPU Datasheet (SXM),
NVIDIA GB200 NVL72 datasheet (a superchip has two GPUs, a rack 72). What is reached of them, and
what an exchange and a launch take, is assumed: costs that a server measured are better.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import parse_object, read_object, read_text

# Bits per weight with its scales: FP8 one float32 per block of 128 x 128, FP4 one byte per 16.
WEIGHT_BITS = MappingProxyType({"bf16": 16.0, "fp8": 8 + 32 / 128**2, "fp4": 4 + 8 / 16})
COMPUTED_SHARE = 0.5  # of the peak, in grouped products of prefill sizes; assumed
MEMORY_SHARE = 0.8  # of the peak, reading weights; assumed
LINK_SHARE = 0.79  # UltraEP's busiest link: 712 of 900 GB/s (arXiv 2606.04101)
# As one H200 took that played all ranks; it looked ids up while it planned.
EXCHANGE_SECONDS = 18e-6  # count 14 us, exchange 4 us
_PLAN_SECONDS = ((8, 18e-6), (16, 22e-6), (32, 27e-6))  # up to so many ranks
_MOST_PLAN_SECONDS = 60e-6
BASE_SECONDS = 100e-6  # launches of a layer, latency of dispatch and combine; assumed
_MATRICES = 3  # gate, up, down
_MOST = 1 << 20  # of any size; no model has more


@dataclass(frozen=True)
class Hardware:
    """One GPU's peaks."""

    bf16_flops: float  # per second, dense
    fp8_flops: float
    memory_bytes_per_second: float
    link_bytes_per_second: float  # NVLink, one direction
    domain_size: int  # GPUs that NVLink joins


_H100 = Hardware(989.5e12, 1979e12, 3.35e12, 450e9, 8)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "h100": _H100,
        "h200": replace(_H100, memory_bytes_per_second=4.8e12),
        "gb200": Hardware(2500e12, 5000e12, 8e12, 900e9, 72),
    }
)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model's routed experts."""

    hidden_size: int
    expert_size: int  # moe_intermediate_size
    num_experts: int  # E
    experts_per_token: int  # K

    @property
    def expert_weights(self) -> int:
        """Parameters of one expert."""
        return _MATRICES * self.hidden_size * self.expert_size


MODELS: Mapping[str, ModelSizes] = MappingProxyType(  # as their public configurations say
    {
        "qwen3-235b-a22b": ModelSizes(4096, 1536, 128, 8),
        "qwen3-30b-a3b": ModelSizes(2048, 768, 128, 8),
        "glm-4.7": ModelSizes(5120, 1536, 160, 8),
        "deepseek-v3": ModelSizes(7168, 2048, 256, 8),
        "deepseek-v2-lite": ModelSizes(2048, 1408, 64, 6),
        "deepseek-v4-flash": ModelSizes(4096, 2048, 256, 6),
        "glm-5": ModelSizes(6144, 2048, 256, 8),
    }
)


def model_sizes(name_or_path: str) -> ModelSizes:
    """Those of a model of ``MODELS``, or of a ``config.json`` or its directory.

    Raises ConfigError: no such name or file, or not the configuration of a MoE model.
    """
    if name_or_path.lower() in MODELS:
        return MODELS[name_or_path.lower()]
    path = Path(name_or_path)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):
        raise ConfigError(
            f"{name_or_path!r} is neither a config.json nor one of {', '.join(MODELS)}"
        )
    config: Any = read_object(path, "the model's configuration")
    config = config.get("text_config") or config  # multimodal models nest the language model
    return ModelSizes(
        _size(config, "hidden_size"),
        _size(config, "moe_intermediate_size", "intermediate_size"),
        _size(config, "num_experts", "n_routed_experts", "num_local_experts"),
        _size(config, "num_experts_per_tok"),
    )


def _size(config: Any, *names: str) -> int:
    """The first of ``names`` that ``config`` has."""
    for name in names if isinstance(config, Mapping) else ():
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST:
            return value
    raise ConfigError(f"the model's configuration has no usable {' or '.join(names)}; is it a MoE?")


def estimated_costs(
    model: ModelSizes, hardware: Hardware, weight_type: str, num_ranks: int
) -> CostModel:
    """Costs of one MoE layer on one of ``num_ranks``, without attention and shared experts.

    ``weight_type`` is one of ``WEIGHT_BITS``; FP4 computes at the FP8 peak. Dispatch and combine
    are counted with their assignments, as far as the busiest rank's link is concerned.
    """
    is_bf16 = weight_type == "bf16"
    flops = COMPUTED_SHARE * (hardware.bf16_flops if is_bf16 else hardware.fp8_flops)
    link = LINK_SHARE * hardware.link_bytes_per_second
    activation_bytes = model.hidden_size * (2 + (2 if is_bf16 else 1))  # sent, and back in BF16
    expert_bytes = round(model.expert_weights * WEIGHT_BITS[weight_type] / 8)
    return CostModel(
        seconds_per_assignment=2 * model.expert_weights / flops + activation_bytes / link,
        bytes_per_expert=expert_bytes,
        link_bytes_per_second=link,
        exchange_seconds=EXCHANGE_SECONDS,
        plan_seconds=next(
            (seconds for most, seconds in _PLAN_SECONDS if num_ranks <= most), _MOST_PLAN_SECONDS
        ),
        base_seconds=BASE_SECONDS,
        read_seconds_per_expert=expert_bytes / (MEMORY_SHARE * hardware.memory_bytes_per_second),
    )


def measured_costs(path: Path) -> CostModel:
    """The costs in ``path``: a cost model, the answer of ``status --json``, or a server's log.

    Of a log those that it printed last. Raises ConfigError.
    """
    text = read_text(path, "the cost model")
    if logged := re.findall(r"ultraep: costs (\{[^{}]*\})", text):
        return CostModel.from_json(logged[-1])
    values = parse_object(text, "the cost model")
    if "costs" not in values:
        return CostModel.from_mapping(values)
    if not isinstance(values["costs"], dict):
        raise ConfigError(f"the server of {path} had measured no costs yet; ask it again")
    return CostModel.from_mapping(values["costs"])
