"""The spec of a checkpoint that takes seconds to make and to load."""

from dataclasses import replace

from ultraep_lab.demo.spec import ModelSpec


def tiny_qwen3(imbalance: float = 1.6, num_ranks: int = 2) -> ModelSpec:
    """Qwen3-MoE, 3 layers of 8 experts."""
    return replace(
        ModelSpec(),
        imbalance=imbalance,
        hidden_size=128,
        num_layers=3,
        num_experts=8,
        experts_per_token=2,
        moe_intermediate_size=64,
        num_heads=4,
        head_dim=32,
        num_ranks=num_ranks,
    )
