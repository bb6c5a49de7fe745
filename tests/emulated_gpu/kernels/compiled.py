"""What a launch makes of a kernel: the PTX for sm_90a, and the values that it is given.

Signature, constants and values are taken from Triton's own binder, as a launch on a device takes
them, so nothing here knows any kernel's parameters.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from tests.emulated_gpu.kernels.library import private_folder
from tests.emulated_gpu.kernels.parse import ParsedKernel, parse
from tests.support.offline import Launch, bound

__all__ = ["Change", "Prepared", "Rewrite", "inline_assembly", "prepare", "rewritten"]

Change = Callable[[ParsedKernel], ParsedKernel]  # makes a mistake, or none; asked once a kernel
_ARCH = 90
_ASSEMBLY = re.compile(r'elementwise_inline_asm "([^"]*)"')
_SCRATCH_POINTERS = 2  # parameters that the compiler adds; no kernel here uses them


class Rewrite(NamedTuple):
    """A text of a function that kernels call, and what stands there instead, in as many lines."""

    function: Any  # a triton.JITFunction
    before: str
    after: str


@dataclass(frozen=True)
class Prepared:
    """One launch, ready for the machine."""

    kernel: ParsedKernel
    shared_bytes: int
    grid: int
    num_warps: int
    values: list[int]  # of the PTX's parameters, in order
    tensors: list[torch.Tensor]  # that are passed


@dataclass(frozen=True)
class _Compiled:
    ptx: str
    shared_bytes: int
    assembly: list[str]  # that the kernel itself has


_modules: dict[Any, _Compiled] = {}


def prepare(launch: Launch, change: Change | None = None) -> Prepared:
    """Compile and parse, each once. Raises PtxError for PTX that is not known."""
    function, target = launch.function, GPUTarget("cuda", _ARCH, 32)
    made = bound(function, launch.arguments, _ARCH)
    types = made.signature, made.constants, made.attributes
    key = function.cache_key, launch.num_warps, *map(str, types)
    if key not in _modules:
        options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
        source, backend = ASTSource(function, *types), type(make_backend(target))
        with knobs.cache.scope(), mock.patch.object(backend, "make_cubin", _no_cubin):
            knobs.cache.dir = str(private_folder() / "triton")  # others need what ptxas makes
            compiled = triton.compile(source, target=target, options=options)
        assembly = _ASSEMBLY.findall(compiled.asm["ttir"])
        _modules[key] = _Compiled(compiled.asm["ptx"], compiled.metadata.shared, assembly)
    module = _modules[key]
    kernel = _parsed(module.ptx)
    if change is not None:
        kernel = change(kernel)
    tensors = [leaf for leaf in made.passed() if isinstance(leaf, torch.Tensor)]
    values = [*made.words(), *[0] * _SCRATCH_POINTERS]
    if len(values) != len(kernel.parameters):
        raise ValueError(f"{function.__name__} takes {len(kernel.parameters)}, not {len(values)}")
    (grid,) = launch.grid
    return Prepared(kernel, module.shared_bytes, grid, launch.num_warps, values, tensors)


@contextmanager
def rewritten(rewrite: Rewrite | None) -> Iterator[None]:
    """Inside, kernels are compiled with it; None: as they are."""
    if rewrite is None:
        yield
        return
    function, before, after = rewrite
    source = function.src
    assert source.count(before) == 1, f"{before!r} in {function.__name__}"
    try:
        _set_source(function, source.replace(before, after))
        yield
    finally:
        _set_source(function, source)


def _set_source(function: Any, source: str) -> None:
    function._unsafe_update_src(source)
    modules = [each for name, each in sys.modules.items() if name.startswith("ultraep_kernels.")]
    for made in (each for module in modules for each in vars(module).values()):
        if isinstance(made, triton.JITFunction):
            made.hash = None  # of those that call it too


def inline_assembly() -> set[str]:
    """Instructions that kernels compiled until now have in inline assembly, without operands."""
    texts = [text for module in _modules.values() for text in module.assembly]
    statements = ";".join(texts).split(";")
    return {statement.split()[0] for statement in statements if statement.strip()}


def _no_cubin(*_: Any) -> bytes:
    """``ptxas`` takes longer than all else, and nothing here runs what it makes."""
    return b""


@cache
def _parsed(ptx: str) -> ParsedKernel:
    return parse(ptx)
