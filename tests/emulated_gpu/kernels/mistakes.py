"""Mistakes that the checks must find: in compiled kernels, and in how the host orders streams.

A mistake in a kernel changes instructions by the function that they were compiled from, so it
stays where it is when lines move.
"""

import ast
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import ultraep_kernels.device
from triton.language import standard
from ultraep_kernels.device._plan_residents import forget_what_changed
from ultraep_kernels.device._plan_search import _is_wanted, search
from ultraep_kernels.device.exchange import fill_row
from ultraep_kernels.device.stream import _await_slot

from tests.emulated_gpu.kernels.compiled import Change, Rewrite, rewritten
from tests.emulated_gpu.kernels.flow import Instruction
from tests.emulated_gpu.kernels.parse import ParsedKernel
from tests.emulated_gpu.kernels.scenarios import SCENARIOS, Outcome, play

__all__ = ["MISTAKES", "Mistake", "Site", "play_with", "sites"]

_FOLDERS = [Path(module.__file__).parent for module in (ultraep_kernels.device, standard)]


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
    target: Site | None = None  # the instructions that are changed; "" is any name
    change: str = "remove"  # or what else ``_changed`` knows
    scenario: str = "one batch"
    rewrite: Rewrite | None = None  # what is compiled instead of it
    forgets: str = ""  # what hosts leave out instead, see ``Cluster``
    resident: int = 0  # programs of a rank at a time; 0 as the seed has it


def _at(operation: str, function: str, caller: str = "", kernel: str = "") -> Site:
    return Site(kernel, function, caller, operation)


_COUNT, _PLAN, _RECEIVE = "_count_kernel", "plan_kernel", "_receive_kernel"
_POST_ROW, _POST_CHUNK = ("post", "exchange_program"), ("post", "_transfer")
_SLOT = ("read_flags", "_await_slot", _RECEIVE)
_ACQUIRES = 'read_flags(first + chunks * 8, exists, "acquire")'
MISTAKES = (
    # a row, from rank to rank
    Mistake("row posted before all have written it", _at("barrier", *_POST_ROW)),
    Mistake("row posted without a release", _at("fence", *_POST_ROW)),
    Mistake("row released to its own device only", _at("fence", *_POST_ROW), "gpu"),
    Mistake("row posted by a weak store", _at("store", *_POST_ROW), "weak"),
    Mistake("row posted at the scope of a device", _at("store", *_POST_ROW), "gpu"),
    Mistake("row not acquired", _at("fence", "_read_flag", "wait", _COUNT)),
    Mistake(
        "row acquired within the device only", _at("fence", "_read_flag", "wait", _COUNT), "gpu"
    ),
    Mistake("row polled by weak loads", _at("load", "_read_flag", "wait", _COUNT), "weak"),
    Mistake("row not awaited", _at("load", "_read_flag", "wait", _COUNT), "arrived"),
    Mistake("row read without a proxy fence", _at("fence_alias", "fence_aliases", "wait", _COUNT)),
    # chunks of experts, into slots
    Mistake("chunk posted before all have written it", _at("barrier", *_POST_CHUNK)),
    Mistake("chunk posted without a release", _at("fence", *_POST_CHUNK)),
    Mistake("chunk posted by a weak store", _at("store", *_POST_CHUNK), "weak"),
    Mistake("chunk posted at the scope of a device", _at("store", *_POST_CHUNK), "gpu"),
    Mistake("slot not acquired", _at("fence", *_SLOT)),
    Mistake("slot not awaited", _at("load", *_SLOT), "arrived"),
    Mistake("slot read without a proxy fence", _at("fence_alias", "fence_aliases", *_SLOT[1:])),
    Mistake("relay does not acquire", _at("fence", "_read_flag", "wait"), scenario="relays"),
    Mistake("relay does not wait", _at("load", "_read_flag", "wait"), "arrived", "relays"),
    # programs of a launch
    Mistake("count: arrival not released", _at("atom", "arrive", "", _COUNT), "no release"),
    Mistake("count: arrival not acquired", _at("atom", "arrive", "", _COUNT), "no acquire"),
    Mistake("count: arrival before all have written", _at("barrier", "arrive", "", _COUNT)),
    Mistake("count: arrivals not acquired", _at("load", "await_arrivals", "", _COUNT), "relaxed"),
    Mistake("count: no tickets", _at("atom", "take_turn", "", _COUNT), "program id", resident=1),
    Mistake("plan: arrival not released", _at("atom", "arrive", "", _PLAN), "no release"),
    Mistake("plan: arrival not acquired", _at("atom", "arrive", "", _PLAN), "no acquire"),
    Mistake("plan: arrival before all have written", _at("barrier", "arrive", "", _PLAN)),
    Mistake("plan: arrivals not acquired", _at("load", "await_arrivals", "", _PLAN), "relaxed"),
    Mistake("plan: no tickets", _at("atom", "take_turn", "", _PLAN), "program id", resident=1),
    Mistake("plan: decision by a weak store", _at("store", "put", "take_winners"), "weak"),
    # threads of a program
    Mistake("histogram without its barriers", _at("barrier", "_count_block", "", _COUNT)),
    Mistake(
        "slots read too early", _at("barrier", "_finish_slots", "", _PLAN), scenario="many slots"
    ),
    Mistake("goes on after a wait given up", _at("trap", "stop"), scenario="a silent rank"),
    # more than one block
    Mistake(
        "slot acquired by its first block of flags only",
        rewrite=Rewrite(_await_slot, _ACQUIRES, f"if start == 0: {_ACQUIRES}"),
        scenario="many chunks",
    ),
    # copies that stay
    Mistake(
        "a rank's change is not told",
        rewrite=Rewrite(fill_row, "tl.load(choice_ptr + 2)", "0"),
        scenario="copies stay",
    ),
    Mistake(
        "a stale copy stays",
        rewrite=Rewrite(forget_what_changed, "nothing, mask=is_place", "nothing, mask=places < 1"),
        scenario="copies stay",
    ),
    Mistake(
        "attempts do not wait to be wanted",
        rewrite=Rewrite(_is_wanted, "await_arrivals(turns_ptr + _SPLIT, 1)", "pass"),
        scenario="copies stay",
    ),
    Mistake(
        "plans are compared before copies are tried",
        rewrite=Rewrite(search, "await_arrivals(turns_ptr + _GROWN, 1)", "pass"),
        scenario="copies stay",
    ),
    # streams
    Mistake("experts do not wait for the side stream", forgets="join"),
    Mistake("the side stream does not wait for the plan", forgets="fork"),
    Mistake("slots overwritten a layer early", forgets="experts"),
    Mistake("slots awaited beside a dispatch that takes all", scenario="dispatch", forgets="place"),
)


def play_with(mistake: Mistake, seed: int) -> Outcome:
    """Its scenario, with the mistake made."""
    scenario = SCENARIOS[mistake.scenario]
    options = scenario.options_of(seed, mistake.resident)
    with rewritten(mistake.rewrite):
        return play(scenario, options, _change_of(mistake), mistake.forgets)


def _change_of(mistake: Mistake) -> Change | None:
    if mistake.target is None:
        return None
    target = mistake.target
    made: dict[int, tuple[ParsedKernel, ParsedKernel]] = {}

    def change(kernel: ParsedKernel) -> ParsedKernel:
        if id(kernel) not in made:
            code = [
                _changed(each, mistake.change) if _is_meant(target, site) else each
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


def _is_meant(target: Site, site: Site) -> bool:
    pairs = zip(astuple(target), astuple(site), strict=True)
    return all(not wanted or wanted == found for wanted, found in pairs)


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
            return sorted(
                (each.lineno, each.end_lineno or each.lineno, each.name) for each in nodes
            )
    return []
