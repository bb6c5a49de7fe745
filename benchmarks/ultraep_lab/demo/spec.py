"""What a made-up MoE model looks like."""

from dataclasses import dataclass
from typing import Literal

MAX_EXPERT_SHARE = 0.92  # of a layer's tokens, the most that one expert may attract
# Of glm4_moe: groups of experts, how many of them a token may choose from, leading layers without.
GROUPS, GROUPS_PER_TOKEN, DENSE_LAYERS = 4, 2, 1


@dataclass(frozen=True)
class ModelSpec:
    """Sizes, skew and seed of a checkpoint; equal specs give equal bytes on one machine.

    The defaults are the demo's model. With architecture glm4_moe it has sigmoids, grouped top-k, a
    shared expert and a dense layer.
    """

    architecture: Literal["qwen3_moe", "glm4_moe"] = "qwen3_moe"
    hidden_size: int = 512  # H, a multiple of 32, for CPU expert kernels
    num_layers: int = 4
    num_experts: int = 16  # E, a multiple of num_ranks
    experts_per_token: int = 4  # K
    moe_intermediate_size: int = 768  # a multiple of 32
    num_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_ranks: int = 2  # R: expert e counts for rank e // (E / R)
    imbalance: float = 1.7  # max/mean of assignments over ranks, below R; 1.0: a balanced model
    seed: int = 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have experts."""
        first = DENSE_LAYERS if self.architecture == "glm4_moe" else 0
        return tuple(range(first, self.num_layers))

    @property
    def experts_per_rank(self) -> int:
        """L = E / R."""
        return self.num_experts // self.num_ranks
