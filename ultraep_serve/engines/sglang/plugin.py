"""Entry point of the ``sglang.srt.plugins`` group.

SGLang calls ``register`` once in every process it starts, and applies the hooks afterwards.
"""

import logging
import os

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.versions import SGLANG, why_not_loaded
from ultraep_serve.types import Policy

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks, where balancing was switched on.

    Does nothing, and imports nothing of SGLang, in processes without a configuration. SGLang logs
    and only logs exceptions of plugins; what must stop the process is a SystemExit.
    """
    try:
        config = BalanceConfig.from_environment()
        if config is None:
            return
        from ultraep_serve.engines.common.run import refuse_or_serve_plainly
        from ultraep_serve.system.refusals import repeat_at_exit

        repeat_at_exit()
        try:
            from ultraep_serve.engines.sglang.hooks import install
        except (ImportError, AttributeError) as error:
            refusal = why_not_loaded(SGLANG, error)
            if config.policy is Policy.OFF:
                logger.warning("ultraep: %s", refusal.problem)
                return
            is_primary = first_process() == os.getpid()
            refuse_or_serve_plainly(refusal, config, logger, is_primary=is_primary)
            return
        install(config)
    except UltraEPError as error:
        raise SystemExit(f"ultraep: error: {error}") from error
