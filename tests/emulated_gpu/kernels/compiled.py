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
from triton.runtime.jit import create_function_from_signature

from tests.emulated_gpu.kernels.library import private_folder
from tests.emulated_gpu.kernels.parse import ParsedKernel, parse
from tests.support.offline import Launch

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
_binders: dict[int, tuple[Any, Any]] = {}  # of functions, by their id


def prepare(launch: Launch, change: Change | None = None) -> Prepared:
    """Compile and parse, each once. Raises PtxError for PTX that is not known."""
    function, target = launch.function, GPUTarget("cuda", _ARCH, 32)
    backend = make_backend(target)
    if id(function) not in _binders:
        made = create_function_from_signature(function.signature, function.params, backend)
        _binders[id(function)] = function, made
    bound, specialised, _ = _binders[id(function)][1](**launch.arguments)
    fusion = {"enable_fp_fusion": False}
    packed = function._pack_args(backend, fusion, bound, specialised, None)
    _, signature, constants, attributes = packed
    key = function.cache_key, launch.num_warps, str(signature), str(constants), str(attributes)
    if key not in _modules:
        options = {"num_warps": launch.num_warps} | fusion
        source = ASTSource(function, signature, constants, attributes)
        with knobs.cache.scope(), mock.patch.object(type(backend), "make_cubin", _no_cubin):
            knobs.cache.dir = str(private_folder() / "triton")  # others need what ptxas makes
            made = triton.compile(source, target=target, options=options)
        assembly = _ASSEMBLY.findall(made.asm["ttir"])
        _modules[key] = _Compiled(made.asm["ptx"], made.metadata.shared, assembly)
    module = _modules[key]
    kernel = _parsed(module.ptx)
    if change is not None:
        kernel = change(kernel)
    leaves = list(_leaves([signature[name] for name in bound], list(bound.values())))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    values = [leaf.data_ptr() if isinstance(leaf, torch.Tensor) else int(leaf) for leaf in leaves]
    values += [0] * _SCRATCH_POINTERS
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


def _leaves(signature: Any, values: Any) -> Iterator[Any]:
    """What is passed when the kernel runs; the rest are constants."""
    for kind, value in zip(signature, values, strict=True):
        if isinstance(kind, tuple | list):
            yield from _leaves(kind, value)
        elif kind != "constexpr":
            yield value


@cache
def _parsed(ptx: str) -> ParsedKernel:
    return parse(ptx)
