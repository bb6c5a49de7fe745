"""What no adapter balances, whatever its engine; light to import, as vLLM's plugins must be."""

from collections.abc import Collection

from ultraep_serve.errors import UnsupportedError

__all__ = ["require_one_number"]


def require_one_number(num_experts: Collection[int]) -> None:
    """Raise UnsupportedError unless all layers have the same number of experts."""
    if len(numbers := set(num_experts)) > 1:
        raise UnsupportedError(
            f"MoE layers with different numbers of experts {sorted(numbers)} share no slots; "
            "serve without balancing: --on-unsupported=off"
        )
