"""Triton's interpreter, which runs kernels on host memory; chosen before Triton is imported."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted(arguments: Sequence[str]) -> list[str]:
    """The command for ``python ARGUMENTS`` with kernels run by the interpreter."""
    return ["env", "TRITON_INTERPRET=1", sys.executable, *arguments]


def _leave_out_what_has_no_effect() -> None:
    """Kernels run about three times as fast.

    For every call of a function, also between kernels, Triton 3.9 replaces the functions of its
    language anew, and for every sum it finds out whether it overflows, which it would report in
    debug mode only. Other versions are left as they are.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch: Callable[[Any], object] = interpreter._patch_lang
    modules: set[str] = set()

    def patch_once(function: Any) -> object:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


if INTERPRETED:
    _leave_out_what_has_no_effect()
