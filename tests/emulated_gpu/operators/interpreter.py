"""An engine's Triton kernels with values: Triton's interpreter runs them, on the GPU's own bytes.

This project's kernels stay with the machine that executes what Triton compiles. Others are compiled
too, so that one that does not compile is an error here as well. Where the interpreter cannot take
a kernel, or takes minutes, a reference computes what the kernel's contract says.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import interpreter, jit

from tests.emulated_gpu.operators.bfloat16 import compute_bfloat16
from tests.emulated_gpu.operators.host import host, in_stream

__all__ = ["REFERENCES", "interpret_kernels"]

_OURS = "ultraep_kernels", "tests", "__main__"  # packages with kernels of this project
# By a kernel's name. It is given the kernel's arguments by theirs, with tensors on the host, and
# says whether it has taken the launch.
REFERENCES: dict[str, Callable[[SimpleNamespace], bool]] = {}
_compile_and_launch = jit.JITFunction.run


def interpret_kernels() -> None:
    """Take the launches of all kernels that are not this project's."""
    compute_bfloat16()
    jit.JITFunction.run = _run
    jit.JITFunction.__call__ = _call_from_kernel


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
    is_ours = self.fn.__module__.split(".")[0] in _OURS
    if warmup or is_ours:
        return _compile_and_launch(self, *args, grid=grid, warmup=warmup, **named)
    _compile_and_launch(self, *args, grid=grid, warmup=True, **named)
    if callable(grid):
        grid = grid(_by_name(self, args, named))
    _compute(self, args, named, tuple(grid))
    return None


@in_stream
def _compute(kernel: Any, args: Any, named: Any, grid: tuple[int, ...]) -> None:
    if reference := REFERENCES.get(kernel.fn.__name__):
        given = {name: host(value) for name, value in _by_name(kernel, args, named).items()}
        if reference(SimpleNamespace(**given)):
            return
    interpreted = interpreter.InterpretedFunction(kernel.fn)
    with (
        patch.multiple(cuda, gdc_wait=_done, gdc_launch_dependents=_done),
        patch.object(cuda.libdevice, "round", _round),
    ):
        _InPlace(interpreted.rewrite(), interpreted.arg_names, grid)(*args, **named)


def _round(x: Any) -> Any:
    """To the nearest, halves away from 0."""
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


def _done() -> None:
    """What a launch would wait for, or let begin: here one ends before the next."""


def _by_name(kernel: Any, args: Any, named: Any) -> dict[str, Any]:
    return {**dict(zip(kernel.arg_names, args, strict=False)), **named}


class _InPlace(interpreter.GridExecutor):
    """One launch; the interpreter's own copies all arguments to the host and back."""

    def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
        return [_on_host(each) for each in args], {n: _on_host(v) for n, v in kwargs.items()}

    def _restore_args_dev(self, *_: Any) -> None:
        pass


def _on_host(value: Any) -> Any:
    if isinstance(value, jit.TensorWrapper):
        return jit.TensorWrapper(host(value.base), value.dtype)
    if isinstance(value, tuple):
        return interpreter._tuple_create(value, map(_on_host, value))
    return host(value)


def _call_from_kernel(self: Any, *args: Any, **named: Any) -> Any:
    """A function that an interpreted kernel calls. What it replaces of Triton it puts back."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **named)
    finally:
        scope.restore()
