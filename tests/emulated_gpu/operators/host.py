"""torch on the emulated GPU with values: see ``values.cpp``."""

import ctypes
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

__all__ = ["compute_torch", "host", "in_stream"]

_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_captured: list[Any] = []  # callbacks of CUDA graphs, which keep no references to Python's objects


def compute_torch() -> None:
    """Give torch's operators values, once in every process."""
    torch.ops.load_library(os.environ["EMULATED_GPU_OPERATORS"])
    torch.ops.emulated_gpu.replace_operators()
    # what else would be launched of cuDNN and fused attention, torch composes of its operators
    torch.backends.cudnn.enabled = False
    for kind in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)


def host(value: Any) -> Any:
    """A CPU tensor over the bytes of a CUDA tensor; anything else as it is."""
    return torch.ops.emulated_gpu.host(value) if isinstance(value, torch.Tensor) else value


def in_stream(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that writes to its arguments, called at once or whenever a graph is launched."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            function(*args, **named)
            return

        def again(_: Any) -> None:
            with torch.inference_mode():
                function(*args, **named)

        _captured.append(_CALLBACK(again))
        ctypes.CDLL("libcuda.so.1").gpu_call(_captured[-1], None, None)

    return run
