"""Mistakes that the checks must find: in compiled kernels, and in how the host orders streams.

A mistake in a kernel changes instructions by the function that they were compiled from, so it
stays where it is when lines move.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton.language.standard
import ultraep_kernels.device

from tests.ptx.compiled import Change
from tests.ptx.parse import Instruction, ParsedKernel

__all__ = ["MISTAKES", "Mistake", "Site", "change_of", "sites"]

_FOLDERS = (Path(ultraep_kernels.device.__file__).parent, Path(triton.language.standard.__file__).parent)


@dataclass(frozen=True)
class Site:
    """Where an instruction comes from: names of functions, and of its kernel."""

    kernel: str
    function: str
    caller: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.function} in {self.caller or self.kernel}, {self.kernel}"


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the scenario that shows it."""

    name: str
    scenario: str
    change: str = "remove"  # or "relaxed", "weak", "gpu", "no release", "no acquire", "program id"
    operation: str = ""
    function: str = ""  # "" any
    caller: str = ""
    kernel: str = ""
    forgets: str = ""  # what the host leaves out, instead of a change: see ``Cluster``
    resident: int = 0  # programs of a rank at a time; 0 as the seed has it


_TURNS = ("_count_kernel", "plan_kernel")
MISTAKES: tuple[Mistake, ...] = (
    Mistake("row posted before it is written", "two ranks", "remove", "barrier", "post", "exchange_program"),
    Mistake("row posted by a relaxed store", "two ranks", "relaxed", "store", "post", "exchange_program"),
    Mistake("row posted by a weak store", "two ranks", "weak", "store", "post", "exchange_program"),
    Mistake("row posted at the scope of a device", "two ranks", "gpu", "store", "post", "exchange_program"),
    Mistake("row awaited by relaxed loads", "two ranks", "relaxed", "load", "read_flags", "", "_count_kernel"),
    Mistake("row awaited at the scope of a device", "two ranks", "gpu", "load", "read_flags", "", "_count_kernel"),
    Mistake("row not awaited", "two ranks", "arrived", "load", "read_flags", "", "_count_kernel"),
    Mistake("row read without a proxy fence", "two ranks", "remove", "fence_alias", "fence_aliases", "", "_count_kernel"),
    Mistake("chunk posted before it is written", "two ranks", "remove", "barrier", "post", "stream_program", "_stream_kernel"),
    Mistake("chunk posted by a relaxed store", "two ranks", "relaxed", "store", "post", "stream_program"),
    Mistake("chunk posted at the scope of a device", "two ranks", "gpu", "store", "post", "stream_program"),
    Mistake("chunk awaited by relaxed loads", "two ranks", "relaxed", "load", "read_flags", "", "_stream_kernel"),
    Mistake("slot not awaited", "two ranks", "arrived", "load", "read_flags", "", "_stream_kernel"),
    Mistake("slot awaited without a proxy fence", "two ranks", "remove", "fence_alias", "fence_aliases", "", "_stream_kernel"),
    Mistake("relay does not wait for a chunk", "relays", "arrived", "load", "read_flags", "", "_stream_kernel"),
    Mistake("arrival of a count not released", "two ranks", "no release", "atom", "arrive", "", "_count_kernel"),
    Mistake("arrival of a count relaxed", "two ranks", "relaxed", "atom", "arrive", "", "_count_kernel"),
    Mistake("arrival of a plan not released", "two ranks", "no release", "atom", "arrive", "", "plan_kernel"),
    Mistake("arrival of a plan not acquired", "two ranks", "no acquire", "atom", "arrive", "", "plan_kernel"),
    Mistake("arrival before all threads have written", "two ranks", "remove", "barrier", "arrive", "", "_count_kernel"),
    Mistake("arrivals awaited by relaxed loads", "two ranks", "relaxed", "load", "await_arrivals", "", "_count_kernel"),
    Mistake("arrivals of a plan awaited by relaxed loads", "two ranks", "relaxed", "load", "await_arrivals", "", "plan_kernel"),
    Mistake("count without tickets", "two ranks", "program id", "atom", "take_turn", "", "_count_kernel", resident=1),
    Mistake("plan without tickets", "two ranks", "program id", "atom", "take_turn", "", "plan_kernel", resident=1),
    Mistake("slots read as others wrote them without a barrier", "four ranks", "remove", "warp_barrier", "finish", "", "plan_kernel"),
    Mistake("senders read as others wrote them without a barrier", "four ranks", "remove", "warp_barrier", "assign_senders", "", "plan_kernel"),
    Mistake("histogram without its barriers", "two ranks", "remove", "barrier", "_count_block", "", "_count_kernel"),
    Mistake("experts do not wait for the side stream", "two ranks", forgets="join"),
    Mistake("the side stream does not wait for the plan", "two ranks", forgets="fork"),
    Mistake("slots overwritten a layer early", "two ranks", forgets="experts"),
    Mistake("slots awaited beside a dispatch that takes all multiprocessors", "dispatch", forgets="place"),
)  # fmt: skip


def change_of(mistake: Mistake) -> Change | None:
    """What makes the mistake in kernels."""
    if not mistake.operation:
        return None
    made: dict[int, tuple[ParsedKernel, ParsedKernel]] = {}

    def change(kernel: ParsedKernel) -> ParsedKernel:
        if id(kernel) not in made:
            code = [
                _changed(each, mistake.change) if _is_meant(mistake, site) else each
                for each, site in zip(kernel.code, sites(kernel), strict=True)
            ]
            made[id(kernel)] = kernel, replace(kernel, code=code)
        return made[id(kernel)][1]

    return change


def sites(kernel: ParsedKernel) -> Iterator[Site]:
    """Of every instruction, in order."""
    for instruction in kernel.code:
        inner, _, outer = kernel.lines[instruction.line].partition(" (from ")
        caller = _function_at(outer.rstrip(")")) if outer else ""
        yield Site(kernel.name, _function_at(inner), caller, instruction.operation)


def _is_meant(mistake: Mistake, site: Site) -> bool:
    return site.operation == mistake.operation and all(
        not wanted or wanted == found
        for wanted, found in (
            (mistake.function, site.function), (mistake.caller, site.caller), (mistake.kernel, site.kernel),
        )
    )  # fmt: skip


def _changed(instruction: Instruction, change: str) -> Instruction:
    if change == "remove":
        return replace(instruction, operation="sleep")
    if change == "relaxed":
        return replace(instruction, order=0)
    if change == "weak":
        return replace(instruction, order=0, strength=0)
    if change == "gpu":
        return replace(instruction, strength=2)
    if change == "no release":
        return replace(instruction, order=1)
    if change == "no acquire":
        return replace(instruction, order=2)
    if change == "program id":
        return replace(instruction, operation="special", kind=1, sources=[])
    assert change == "arrived", change
    # an epoch that nobody reaches
    return replace(instruction, operation="special", kind=7, sources=[])


def _function_at(place: str) -> str:
    """The function around a line, "file.py:3"; the file's name where it is none of ours."""
    file, _, line = place.partition(":")
    inside = [name for first, last, name in _functions(file) if first <= int(line or 0) <= last]
    return inside[-1] if inside else file


@cache
def _functions(file: str) -> list[tuple[int, int, str]]:
    for folder in _FOLDERS:
        if (folder / file).exists():
            tree: Any = ast.parse((folder / file).read_text())
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            return sorted((node.lineno, node.end_lineno or node.lineno, node.name) for node in nodes)
    return []
