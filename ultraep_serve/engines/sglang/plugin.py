"""Entry point of the ``sglang.srt.plugins`` group.

SGLang calls ``register`` once in every process it starts, and applies the hooks afterwards.
"""

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.logs import set_up_logs

__all__ = ["register"]


def register() -> None:
    """Register the hooks, where balancing was switched on.

    Does nothing, and imports nothing of SGLang, in processes without a configuration. SGLang logs
    and only logs exceptions of plugins; what must stop the process is a SystemExit.
    """
    try:
        config = BalanceConfig.from_environment()
        if config is None:
            return
        set_up_logs(config.log_format)
        from ultraep_serve.engines.common.process import tidy_up_at_exit
        from ultraep_serve.engines.sglang.hooks import install

        tidy_up_at_exit()
        install(config)
    except UltraEPError as error:
        raise SystemExit(f"ultraep: error: {error}") from error
