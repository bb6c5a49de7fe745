"""Entry point of the ``vllm.general_plugins`` group.

vLLM calls ``register`` in every process it starts, before it knows whether that process will build
a model, and before it has a configuration. Whether to balance is decided when a model is built.
"""

import logging
import sys

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.guard import SETTING, setting_on_command_line
from ultraep_serve.system.environment import share_with_ray_workers
from ultraep_serve.system.refusals import repeat_at_exit
from ultraep_serve.system.versions import VLLM, why_not_loaded

logger = logging.getLogger("vllm.ultraep_serve")


def register() -> None:
    """Have vLLM's workers balance the models that they load; they do nothing where nobody asked.

    Raises ConfigError, before anything is started, for wrong settings in the environment (as
    SystemExit for those on the command line), and UnsupportedError where they ask for balancing and
    this vLLM has other workers.
    """
    given = setting_on_command_line(sys.argv)
    try:
        asked = BalanceConfig.chosen(given, f"--additional-config {SETTING}")
    except ConfigError as error:
        if given is None:
            raise
        raise SystemExit(f"ultraep: error: {error}") from error
    share_with_ray_workers()
    repeat_at_exit()
    try:
        from ultraep_serve.engines.vllm.load import join_workers

        join_workers()
    except (ImportError, AttributeError) as error:
        refusal = why_not_loaded(VLLM, error)
        if asked is not None and asked.on_unsupported == "error":
            raise refusal from error
        logger.warning("ultraep: %s", refusal.problem)
