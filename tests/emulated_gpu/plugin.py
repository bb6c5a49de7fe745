"""What is real on the emulated GPU, in every process that imports torch.

The kernels of this project are executed as Triton compiles them, by the machine in ``kernels``, so
plans, rerouted ids, the bytes in slots and records are right. torch's operators, both engines' and
their Triton kernels have values too (``operators``, ``references``).
"""

import ctypes
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["DISPATCH", "execute_kernels", "prepare_sglang", "prepare_vllm"]

DISPATCH = "EMULATED_GPU_DISPATCH"  # set where DeepEP and FlashInfer's dispatch seem installed

_OURS = "ultraep_kernels", "tests/emulated_gpu/"  # in names of source files, which PTX has
_kept: list[Any] = []  # that the library reads


def execute_kernels() -> None:
    """Entry point of torch: execute what Triton loads of this project, and give torch values."""
    from triton import knobs

    from tests.emulated_gpu.operators.host import compute_torch
    from tests.emulated_gpu.operators.interpreter import interpret_kernels

    knobs.runtime.kernel_load_end_hook = _execute
    compute_torch()
    interpret_kernels()
    if os.environ.get(DISPATCH):
        from tests.emulated_gpu.references.deep_ep import install_deep_ep
        from tests.emulated_gpu.references.deep_gemm import install_deep_gemm

        install_deep_ep()
        install_deep_gemm()


def prepare_vllm() -> None:
    """Entry point of vLLM: give what it has compiled values."""
    from tests.emulated_gpu.mistakes import make_mistakes
    from tests.emulated_gpu.references.vllm import compute_vllm, offer_dispatch

    if os.environ.get(DISPATCH):
        offer_dispatch()
    compute_vllm()
    make_mistakes()


def prepare_sglang() -> None:
    """Entry point of SGLang: give what it has compiled values."""
    from tests.emulated_gpu.mistakes import make_mistakes
    from tests.emulated_gpu.references.sglang import compute_sglang

    compute_sglang()
    make_mistakes()


def _execute(module: int, function: int, name: str, files: dict[str, str], key: str) -> None:
    ptx = Path(files[f"{name}.ptx"]).read_text()
    if not any(ours in ptx for ours in _OURS):
        return
    from tests.emulated_gpu.kernels.machine import kernel_of
    from tests.emulated_gpu.kernels.parse import parse

    parsed = parse(ptx)
    shared = json.loads(Path(files[f"{name}.json"]).read_text())["shared"]
    kernel, kept = kernel_of(parsed, shared)
    numbers = [number for _, *place in parsed.parameters for number in place]
    parameters = (ctypes.c_int * len(numbers))(*numbers)
    _kept.append((kernel, kept, parameters))
    ctypes.CDLL("libcuda.so.1").gpu_execute(
        ctypes.c_void_p(function), ctypes.byref(kernel), parameters, len(parsed.parameters)
    )
