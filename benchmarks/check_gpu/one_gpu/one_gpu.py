"""A plug-in of vLLM and SGLang: two ranks on one GPU.

vLLM gives every rank a device of its own; here all have device 0. NCCL refuses ranks that share a
GPU, unless they are on different hosts: every process says that it is one.
"""

import os
from typing import Any


def register() -> None:
    """Entry point of vLLM, called in each of its processes."""
    say_other_host()
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs._resolve_device_ids = _only_device_0


def say_other_host() -> None:
    """Entry point of SGLang, called in each of its processes."""
    os.environ["NCCL_HOSTID"] = str(os.getpid())


def _only_device_0(arguments: Any) -> list[int]:
    return [0] * arguments.tensor_parallel_size
