"""Entry point of the ``vllm.general_plugins`` group.

vLLM calls ``register`` in every process it starts, before it knows whether that process will build
a model, and before it has a configuration. Whether to balance is decided when a model is built.
"""

import argparse
import json
import sys

from ultraep_serve.adapters.process import tidy_up_at_exit
from ultraep_serve.config import BalanceConfig

__all__ = ["SETTING", "register"]

SETTING = "ultraep"  # its name in vLLM's --additional-config


def register() -> None:
    """Have vLLM build experts that can be balanced; they are vLLM's own where nobody asked.

    Raises ConfigError, before anything is started, for settings in the environment or on the
    command line that are wrong.
    """
    BalanceConfig.chosen(_setting_of(sys.argv), f"--additional-config {SETTING}")
    tidy_up_at_exit()
    from ultraep_serve.adapters.vllm.routed_experts import substitute

    substitute()


def _setting_of(arguments: list[str]) -> object:
    """What the command line says under ``SETTING``; None where vLLM finds it elsewhere, or not."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--additional-config", "--additional_config")
    given = parser.parse_known_args(arguments[1:])[0].additional_config
    try:
        found = json.loads(given or "{}")
    except ValueError:
        return None  # vLLM says what is wrong with it
    return found.get(SETTING) if isinstance(found, dict) else None
