"""What is real on the emulated GPU: the kernels of this project, and ids for them to work on.

They are executed as Triton compiles them, by the machine in ``kernels``, so plans, rerouted ids,
the bytes in slots and records are right, in every process that imports torch. An engine's own
kernels do nothing, so its routers choose nobody: ids are made up here before they are balanced.
"""

import ctypes
import json
import os
from functools import cache, wraps
from pathlib import Path
from typing import Any

__all__ = ["execute_kernels", "play_routing"]

_OURS = "ultraep_kernels"  # in the names of source files, which Triton puts into PTX
_MOST_EXPERTS = 8  # that play a part; every model here has as many
_kept: list[Any] = []  # that the library reads


def execute_kernels() -> None:
    """Entry point of torch: execute what Triton loads of this project."""
    if "ULTRAEP_EMULATED_GPU" in os.environ:
        from triton import knobs

        knobs.runtime.kernel_load_end_hook = _execute


@cache  # plug-ins may be called again
def play_routing() -> None:
    """Entry point of engines: tokens choose experts by chance, some of them far more often."""
    import torch

    from ultraep_serve.balance.cuda.balancer import DeviceBalancer

    route = DeviceBalancer.route

    @wraps(route)
    def played(self: Any, layer: int, topk_ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        topk_ids.copy_(_choices(layer, *topk_ids.shape, topk_ids.dtype))
        return route(self, layer, topk_ids, *others, **named)

    DeviceBalancer.route = played


@cache
def _choices(layer: int, tokens: int, top_k: int, dtype: Any) -> Any:
    """(T, K) different experts for each token, the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(layer)
    weights = torch.rand(_MOST_EXPERTS, generator=generator).pow(4).add(0.01).expand(tokens, -1)
    if not tokens:
        return torch.empty((0, top_k), dtype=dtype)
    return torch.multinomial(weights, top_k, generator=generator).to(dtype)


def _execute(module: int, function: int, name: str, files: dict[str, str], key: str) -> None:
    ptx = Path(files[f"{name}.ptx"]).read_text()
    if _OURS not in ptx:
        return
    from tests.emulated_gpu.kernels.machine import kernel_of
    from tests.emulated_gpu.kernels.parse import parse

    parsed = parse(ptx)
    shared = json.loads(Path(files[f"{name}.json"]).read_text())["shared"]
    kernel, kept = kernel_of(parsed, shared)
    numbers = [number for _, *place in parsed.parameters for number in place]
    parameters = (ctypes.c_int * len(numbers))(*numbers)
    _kept.append((kernel, kept, parameters))
    ctypes.CDLL("libcuda.so.1").emulated_gpu_execute(
        ctypes.c_void_p(function), ctypes.byref(kernel), parameters, len(parsed.parameters)
    )
