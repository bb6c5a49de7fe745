"""Entry point of the ``vllm.general_plugins`` group.

vLLM calls ``register`` in every process it starts, perhaps more than once.
"""

from ultraep_serve.config import BalanceConfig

__all__ = ["register"]


def register() -> None:
    """Put the balanced experts in place of vLLM's own, where balancing was switched on.

    Does nothing, and imports nothing of vLLM, in processes without a configuration.
    """
    if BalanceConfig.from_environment() is None:
        return
    from ultraep_serve.adapters.vllm.routed_experts import substitute

    substitute()
