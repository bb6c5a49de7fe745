"""When a worker of vLLM has loaded its model, before memory is profiled, the model is balanced.

Executors ask a worker by the name of a method, through ``WorkerWrapperBase``, which hands on what
it does not have itself. It gets a ``load_model`` of its own here, which calls the worker's. So
every loader is covered, and a draft model is there too. Verified with 0.32 and 0.33. Remove when
vLLM tells plugins that a model is loaded.
"""

import sys
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.run import refuse_or_serve_plainly
from ultraep_serve.engines.vllm import checks
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher.guard import SETTING
from ultraep_serve.system.refusals import repeated_at_exit
from ultraep_serve.types import Policy

logger = init_logger("vllm.ultraep_serve")


def join_workers() -> None:
    """Have vLLM's workers balance what they load; calling twice is harmless.

    Raises AttributeError for a vLLM whose workers are asked in another way.
    """
    if vars(WorkerWrapperBase).get("load_model") is _load_model:
        return
    if "load_model" in vars(WorkerWrapperBase) or "__getattr__" not in vars(WorkerWrapperBase):
        raise AttributeError("WorkerWrapperBase does not hand load_model on to its worker")
    WorkerWrapperBase.load_model = _load_model


def _load_model(wrapper: WorkerWrapperBase, *args: Any, **named: Any) -> Any:
    vllm_config = wrapper.vllm_config
    with repeated_at_exit():
        config = config_of(vllm_config)
    loaded = wrapper.worker.load_model(*args, **named)
    if config is not None:
        # Only now: it brings numba, see below.
        from ultraep_serve.engines.vllm.model import take_over

        with repeated_at_exit(), set_current_vllm_config(vllm_config):
            take_over(config, wrapper.worker, vllm_config)
        _let_modules_be_scanned()
    return loaded


def _let_modules_be_scanned() -> None:
    """Have the next engine of this process find a ``__dict__`` where it looks for one.

    Before a worker loads a model, it scans what all modules hold for Triton kernels
    (``triton_utils.dispatcher._rebind_kernels``). llvmlite's library, which numba brings, has a
    function of every name, ``__dict__`` among them. Verified with 0.32 and 0.33.
    """
    if "numba" in sys.modules:
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}


def config_of(vllm_config: VllmConfig) -> BalanceConfig | None:
    """What was asked for in ``vllm_config`` or the environment, where there is something to do.

    Raises ConfigError for wrong settings, UnsupportedError for an engine this adapter was not
    verified with, and for settings of vLLM's that contradict balancing.
    """
    given = vllm_config.additional_config
    setting = given.get(SETTING) if isinstance(given, Mapping) else None
    config = BalanceConfig.chosen(setting, f"additional_config[{SETTING!r}]")
    if config is None or (config.policy is Policy.OFF and not current_platform.is_cpu()):
        return None  # vLLM's own expert parallelism works on a GPU
    if vllm_config.parallel_config.enable_expert_parallel:
        checks.check_checkpoint(vllm_config)
    is_first = checks.is_primary(vllm_config)
    try:
        notes = [checks.check_engine(config.on_newer_engine)]
        if config.policy is not Policy.OFF:
            checks.check_settings(vllm_config, config)
            notes.append(checks.note_on_graphs(vllm_config, config))
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_first)
        return config.replace(policy=Policy.OFF) if current_platform.is_cpu() else None
    for sentence in filter(None, notes if is_first else ()):
        logger.warning_once("ultraep: %s", sentence)
    return config
