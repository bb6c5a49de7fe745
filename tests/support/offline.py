"""Compile what launchers launch for a GPU that is not there, and say what it needs of a processor.

Launchers run as they are, on tensors in host memory; their launches are recorded instead of made.
Then every recorded kernel is compiled with the types and constants it was launched with.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher would have made."""

    function: Any  # the triton.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    maxnreg: int | None = None  # registers of a thread at most


class Bound(NamedTuple):
    """The arguments of a launch as Triton binds them for a GPU."""

    values: dict[str, Any]  # by name, like the types
    specialised: Any  # what the kernel is compiled for
    signature: dict[str, Any]
    constants: Any
    attributes: Any

    def passed(self) -> Iterator[Any]:
        """What is passed when the kernel runs, tensors and numbers; the rest are constants."""

        def leaves(kind: Any, value: Any) -> Iterator[Any]:
            if isinstance(kind, tuple | list):
                for pair in zip(kind, value, strict=True):
                    yield from leaves(*pair)
            elif kind != "constexpr":
                yield value

        for name, value in self.values.items():
            yield from leaves(self.signature[name], value)

    def words(self) -> list[int]:
        """What is passed, of tensors their addresses."""
        return [
            leaf.data_ptr() if isinstance(leaf, torch.Tensor) else int(leaf)
            for leaf in self.passed()
        ]


@dataclass(frozen=True)
class KernelFacts:
    """What ptxas says about one kernel."""

    name: str
    arch: int  # compute capability, 90 is Hopper
    grid: tuple[int, ...]
    num_warps: int
    registers: int  # per thread
    spill_bytes: int  # stored and loaded, per thread
    stack_bytes: int  # per thread
    shared_bytes: int  # per program
    ptx: str  # the code that ptxas was given


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside, launches of Triton kernels are appended to the list that this yields."""
    launches: list[Launch] = []

    def record(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        num_warps, maxnreg = kwargs.pop("num_warps", 4), kwargs.pop("maxnreg", None)
        arguments = dict(zip(function.arg_names, args, strict=False)) | kwargs
        launches.append(Launch(function, tuple(grid), arguments, num_warps, maxnreg))

    with mock.patch.object(triton.JITFunction, "run", record):
        yield launches


@cache
def _binder(function: Any, arch: int) -> tuple[Any, Any]:
    backend = make_backend(GPUTarget("cuda", arch, 32))
    return backend, create_function_from_signature(function.signature, function.params, backend)


def bound(function: Any, arguments: dict[str, Any], arch: int = 90) -> Bound:
    """As ``JITFunction.run`` binds ``arguments`` of a kernel for compute capability ``arch``."""
    backend, bind = _binder(function, arch)
    values, specialised, _ = bind(**arguments)
    options = {"enable_fp_fusion": False}
    _, signature, *rest = function._pack_args(backend, options, values, specialised, None)
    return Bound(values, specialised, signature, *rest)


def compile_launch(launch: Launch, arch: int) -> KernelFacts:
    """Compile for compute capability ``arch`` (90, 100). Raises what the compiler raises."""
    function, target = launch.function, GPUTarget("cuda", arch, 32)
    made = bound(function, launch.arguments, arch)
    source = ASTSource(function, made.signature, made.constants, made.attributes)
    options = {"num_warps": launch.num_warps, "maxnreg": launch.maxnreg, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=target, options=options)
    registers, spills, stack = _assemble(compiled.asm["ptx"], arch)
    return KernelFacts(
        name=function.__name__,
        arch=arch,
        grid=launch.grid,
        num_warps=launch.num_warps,
        registers=registers,
        spill_bytes=spills,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
    )


def _assemble(ptx: str, arch: int) -> tuple[int, int, int]:
    """(registers, bytes spilled, bytes of stack) that ptxas reports."""
    tool = get_ptxas(arch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{arch}a", path, "-o", Path(folder, "cubin")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    report = done.stderr + done.stdout

    def figures(pattern: str) -> int:
        return sum(int(figure) for figure in re.findall(pattern, report))

    spills = figures(r"(\d+) bytes spill stores") + figures(r"(\d+) bytes spill loads")
    return figures(r"Used (\d+) registers"), spills, figures(r"(\d+) bytes stack frame")
