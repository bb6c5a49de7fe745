"""What a made-up MoE model looks like."""

from dataclasses import dataclass

MAX_EXPERT_SHARE = 0.92  # of a layer's tokens, the most that one expert may attract


@dataclass(frozen=True)
class ModelSpec:
    """Sizes, skew and seed of a checkpoint; equal specs give equal bytes on one machine.

    The defaults are the demo's model.
    """

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
    def experts_per_rank(self) -> int:
        """L = E / R."""
        return self.num_experts // self.num_ranks
