"""When vLLM is through with trying its model out, and serves."""

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname

__all__ = ["after_warm_up"]

_WARM_UP = "compile_or_warm_up_model"


def after_warm_up(vllm_config: VllmConfig, action: Callable[[], None]) -> None:
    """Call ``action`` when this process' worker has run the last batch that vLLM makes up.

    Target: ``compile_or_warm_up_model`` of the worker's class, which runs dummy batches of many
    sizes, tunes kernels and captures graphs. vLLM asks every worker for it, and takes requests when
    all have returned. Around, once: then the method is vLLM's own again. Verified with 0.32; 0.33
    has the same by its source. Remove when vLLM tells plugins that a worker is ready.
    """
    worker: Any = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    owner = next(each for each in worker.__mro__ if _WARM_UP in vars(each))
    original = vars(owner)[_WARM_UP]

    @functools.wraps(original)
    def warm_up(self: Any, *args: Any, **named: Any) -> Any:
        setattr(owner, _WARM_UP, original)
        done = original(self, *args, **named)
        action()
        return done

    setattr(owner, _WARM_UP, warm_up)
