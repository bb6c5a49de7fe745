"""What several of the doctor's tests need: findings, ports, the numbers of a small model."""

from ultraep_serve.doctor.finding import Finding

GIB = 1 << 30
MOE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EXPERT_BYTES = 3 * 1024 * 512 * 2


def only(findings: list[Finding]) -> Finding:
    """The one finding of a check."""
    (finding,) = findings
    return finding


def versions(**installed: str) -> dict[str, str]:
    """Installed distributions, with ``_`` for ``-``."""
    return {name.replace("_", "-"): version for name, version in installed.items()}
