"""What a made-up MoE model looks like."""

from dataclasses import dataclass
from typing import Literal

from ultraep_lab.demo.text import DOMAINS
from ultraep_serve.errors import ConfigError

__all__ = ["MAX_EXPERT_SHARE", "ModelSpec"]

MAX_EXPERT_SHARE = 0.92  # of a layer's tokens, the most that one expert may attract


@dataclass(frozen=True)
class ModelSpec:
    """Sizes, skew and seed of a checkpoint; equal specs give equal bytes on one machine.

    The defaults are the demo's model. With architecture glm4_moe it has sigmoids, grouped top-k, a
    shared expert and a dense layer.
    """

    architecture: Literal["qwen3_moe", "glm4_moe"] = "qwen3_moe"
    hidden_size: int = 512  # H, a multiple of 32
    num_layers: int = 4
    num_experts: int = 16  # E, a multiple of num_ranks
    experts_per_token: int = 4  # K
    moe_intermediate_size: int = 768  # a multiple of 32
    num_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 32768
    num_ranks: int = 2  # R: expert e counts for rank e // (E / R)
    imbalance: float = 1.7  # max/mean of assignments over ranks; 1.0 for a balanced model
    domains: tuple[str, ...] = DOMAINS
    seed: int = 0
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of the stored weights
    num_groups: int = 4  # glm4_moe: expert groups
    groups_per_token: int = 2  # glm4_moe: groups a token may choose from
    num_dense_layers: int = 1  # glm4_moe: leading layers without experts
    calibration_length: int = 512  # tokens per calibration text; longer is slower and more exact

    def __post_init__(self) -> None:
        ranks, experts, chosen = self.num_ranks, self.num_experts, self.experts_per_token
        divides = ranks >= 1 and experts % ranks == 0
        _require(divides, f"{experts = } must be divisible by {ranks = }")
        _require(chosen <= experts, f"experts_per_token = {chosen} must be at most {experts = }")
        _require(bool(self.domains), "domains is empty; name at least one")
        for size in (self.hidden_size, self.moe_intermediate_size):
            _require(size % 32 == 0, f"{size = } must be divisible by 32 for CPU expert kernels")
        length = self.calibration_length
        is_multiple = length >= 64 and length % 64 == 0
        _require(is_multiple, f"calibration_{length = } must be a positive multiple of 64")
        heads, kv_heads = self.num_heads, self.num_key_value_heads
        _require(heads % kv_heads == 0, f"{heads = } must be divisible by {kv_heads = }")
        _require(
            1.0 <= self.imbalance <= self.max_imbalance,
            f"{self.imbalance = } must be 1.0 to {self.max_imbalance:.2f}",
        )
        if self.architecture == "glm4_moe":
            self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen, experts = self.num_groups, self.groups_per_token, self.num_experts
        _require(experts % groups == 0, f"{experts = } must be divisible by {groups = }")
        size = experts // groups
        _require(size >= 2, f"{groups = } leaves {size} expert per group; at least 2 are needed")
        _require(
            1 <= chosen <= groups and chosen * size >= self.experts_per_token,
            f"{chosen = } groups of {size} experts must hold {self.experts_per_token = }",
        )
        _require(
            0 <= self.num_dense_layers < self.num_layers,
            f"{self.num_dense_layers = } must be below {self.num_layers = }",
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        first = self.num_dense_layers if self.architecture == "glm4_moe" else 0
        return tuple(range(first, self.num_layers))

    @property
    def experts_per_rank(self) -> int:
        """L = E / R."""
        return self.num_experts // self.num_ranks

    @property
    def max_imbalance(self) -> float:
        """The largest skew at which no expert needs more than ``MAX_EXPERT_SHARE`` of tokens."""
        most = min(self.experts_per_token, MAX_EXPERT_SHARE * self.experts_per_rank)
        return max(1.0, min(0.95 * self.num_ranks, most * self.num_ranks / self.experts_per_token))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
