"""Compile what launchers launch for a GPU that is not there, and say what it needs of a processor.

Launchers run as they are, on tensors in host memory; their launches are recorded instead of made.
Then every recorded kernel is compiled with the types and constants it was launched with.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

__all__ = [
    "KernelFacts",
    "Launch",
    "LongestPath",
    "compile_launch",
    "longest_path",
    "recorded_launches",
]

_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"(@!?%p\d+\s+)?(?:bra(?:\.uni)?\s+(\$L__BB\w+)|ret)\s*;")
_COMMENT = re.compile(r"//.*")
# A thread waits for others here.
_TOGETHER = re.compile(r"\b(?:bar|barrier|shfl|redux|vote|match)\.")


@dataclass(frozen=True)
class Launch:
    """One launch that a launcher would have made."""

    function: Any  # the triton.JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    maxnreg: int | None = None  # registers of a thread at most


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


def compile_launch(launch: Launch, arch: int) -> KernelFacts:
    """Compile for compute capability ``arch`` (90, 100). Raises what the compiler raises."""
    function, target = launch.function, GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialised, _ = bind(**launch.arguments)
    # the same as ``JITFunction.run`` makes of it
    _, signature, constants, attributes = function._pack_args(backend, {}, bound, specialised, None)
    source = ASTSource(function, signature, constants, attributes)
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


@dataclass(frozen=True)
class LongestPath:
    """Of a thread through a kernel, each loop run once."""

    instructions: int
    steps: int  # of these, barriers and exchanges within a warp, where threads wait for each other
    loops: int  # of the whole kernel


def longest_path(ptx: str) -> LongestPath:
    """The path with most instructions through one kernel's code."""
    blocks = _blocks(ptx)
    best: dict[str, tuple[int, int]] = {}  # by block: instructions and steps from there to the end
    loops = 0
    above: set[str] = set()
    visits = [(next(iter(blocks)), False)]
    while visits:  # each block once before and once after those that follow it
        name, is_left = visits.pop()
        block = blocks[name]
        if is_left:
            above.discard(name)
            onward = max((best[each] for each in block.followers if each in best), default=(0, 0))
            best[name] = block.instructions + onward[0], block.steps + onward[1]
        elif name not in best and name not in above:
            above.add(name)
            visits.append((name, True))
            loops += sum(each in above for each in block.followers)
            visits += [(each, False) for each in block.followers if each not in above]
    return LongestPath(*best[next(iter(blocks))], loops)


@dataclass
class _Block:
    """Instructions that run one after another."""

    instructions: int = 0
    steps: int = 0
    followers: list[str] = field(default_factory=list)


def _blocks(ptx: str) -> dict[str, _Block]:
    """Of the first kernel, in order; a block ends at a label or a branch."""
    block = _Block()
    blocks, goes_on = {"entry": block}, True

    def begin(name: str) -> _Block:
        if goes_on:
            block.followers.append(name)
        return blocks.setdefault(name, _Block())

    for number, raw in enumerate(ptx[ptx.index(".entry") :].splitlines()):
        line = _COMMENT.sub("", raw).strip()
        if label := _LABEL.match(line):
            block, goes_on = begin(label[1]), True
            continue
        if not line.endswith(";") or line.startswith("."):
            continue
        block.instructions += 1
        block.steps += bool(_TOGETHER.search(line))
        if branch := _BRANCH.search(line):
            if branch[2]:
                block.followers.append(branch[2])
            goes_on = branch[1] is not None
            block, goes_on = begin(f"after {number}"), True
    return blocks


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
