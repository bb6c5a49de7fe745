"""The engines' versions that the adapters were verified with; readable without any engine."""

__all__ = ["SGLANG_VERSIONS", "VLLM_VERSIONS"]

VLLM_VERSIONS = ("0.32",)  # any patch release of these
SGLANG_VERSIONS = ("0.5.23",)
