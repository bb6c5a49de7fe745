"""Arithmetic in bfloat16 for Triton's interpreter, which keeps such numbers as bits.

It computes with the bits as if they were integers, in silence. Here what is computed is widened to
float32 and rounded back, to the nearest.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

__all__ = ["compute_bfloat16"]


def compute_bfloat16() -> None:
    """Mend the interpreter, once in every process."""
    for name in ("unary_op", "binary_op", "ternary_op", "create_dot"):
        setattr(InterpreterBuilder, name, _in_float32(getattr(InterpreterBuilder, name)))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _casting(getattr(InterpreterBuilder, name)))


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)
    def run(self: Any, *operands: Any) -> Any:
        if not any(_is_bfloat16(each) for each in operands):
            return compute(self, *operands)
        result = compute(self, *map(_widened, operands))
        # of an accumulator in float32 alone the result is in float32
        has_other = compute.__name__ == "create_dot" and not _is_bfloat16(operands[2])
        return result if has_other else _narrowed(result)

    return run


def _casting(cast: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cast)
    def run(self: Any, source: Any, target: Any, *others: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar not in (tl.float8e4nv, tl.float8e5):
            return _narrowed(TensorHandle(_widened(source).data.astype(np.float32), tl.float32))
        if _is_bfloat16(source) and target.scalar == tl.float32:
            return _widened(source)
        return cast(self, _widened(source), target, *others)

    return run


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: Any) -> Any:
    if not _is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(handle: Any) -> Any:
    """Truth values stay as they are."""
    if handle.data.dtype != np.float32:
        return handle
    rounded = torch.from_numpy(np.array(handle.data)).bfloat16()
    bits = rounded.view(torch.int16).numpy().view(np.uint16)
    return TensorHandle(bits, tl.bfloat16)
