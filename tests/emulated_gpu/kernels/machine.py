"""The machine from Python: memory, kernels, launches, and what it reports."""

import ctypes
import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.emulated_gpu.kernels.compiled import Prepared
from tests.emulated_gpu.kernels.library import OPERATIONS, library
from tests.emulated_gpu.kernels.parse import ParsedKernel

__all__ = ["Finding", "Machine", "MachineError", "Options", "kernel_of"]

_INSTRUCTION = np.dtype(
    [
        ("operation", "i8"), ("guard", "i8"), ("negated", "i8"), ("targets", "i8", 4),
        ("sources", "i8", 5), ("immediate", "i8"), ("goes_to", "i8"), ("meets", "i8"),
        ("space", "i8"), ("order", "i8"), ("strength", "i8"), ("num_bytes", "i8"), ("count", "i8"),
        ("kind", "i8"), ("is_signed", "i8"),
    ]
)  # fmt: skip
_SITE_BITS = 1 << 20  # instructions of a kernel at most
_STEPS_AT_ONCE = 20_000_000
_BYTES_OF_CELL = 4
_KINDS = {1: "read", 2: "write", 3: "update", 7: "update"}


class Turn(enum.IntEnum):
    """What ``run`` of machine.c returns."""

    FINISHED = 0
    HOST = 1
    STUCK = 2
    FAILED = 3
    PAUSED = 4


class MachineError(RuntimeError):
    """Execution that cannot go on: a deadlock, or what PTX does not allow."""


@dataclass(frozen=True)
class Options:
    """How a run is made; the same options give the same run."""

    seed: int = 0
    resident: int = 1 << 20  # programs of a rank at a time
    quantum: int = 4  # accesses to memory that a warp makes in one turn, at most
    order: int = 0  # in which programs start: any, 1 ascending, 2 descending
    stuck_after: int = 4_000_000  # instructions without any progress
    checks_races: bool = True


@dataclass(frozen=True)
class Finding:
    """Two accesses that PTX does not order."""

    kind: str  # "race", or "no proxy fence" between accesses through different addresses
    first: str  # what, and where in the source
    second: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.first} / {self.second}"


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p), ("length", ctypes.c_int64), ("num_registers", ctypes.c_int64),
        ("shared_bytes", ctypes.c_int64), ("site", ctypes.c_int64), ("constants", ctypes.c_void_p),
        ("first_constant", ctypes.c_int64), ("num_constants", ctypes.c_int64),
    ]  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [
        ("first", ctypes.c_uint32), ("second", ctypes.c_uint32), ("kind", ctypes.c_uint32),
        ("first_kind", ctypes.c_uint32), ("second_kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64), ("count", ctypes.c_uint64),
    ]  # fmt: skip


class Machine:
    """Some ranks' devices. Add memory and launches, ``run``, and ``begin`` again."""

    def __init__(self, num_ranks: int, options: Options) -> None:
        self._library, self._options = library(), options
        self._pointer = self._library.new_machine(
            num_ranks, options.resident, options.seed, options.quantum,
            options.order, options.stuck_after, options.checks_races,
        )  # fmt: skip
        self._next = self._end = 0  # of programs that were announced
        self._kernels: dict[tuple[int, int], tuple[_Kernel, Any]] = {}
        self._sites: list[ParsedKernel | str] = [""]
        self._cells: list[int] = []
        self._host: dict[int, Callable[[], None]] = {}
        self._num_aliases = 0

    def close(self) -> None:
        """Free everything; the machine cannot be used then."""
        self._library.free_machine(self._pointer)
        for cells in self._cells:
            self._library.free_cells(cells)
        self._cells.clear()

    def new_cells(self, size: int, bytes_of_cell: int = _BYTES_OF_CELL) -> int:
        """What remembers accesses to so many bytes of memory."""
        self._cells.append(self._library.new_cells(-(-size // bytes_of_cell)))
        return self._cells[-1]

    def add_memory(
        self, address: int, size: int, rank: int, cells: int, bytes_of_cell: int = _BYTES_OF_CELL
    ) -> None:
        """Memory of this process that ``rank`` may use at this address; -1: every rank."""
        self._num_aliases += 1
        shift = bytes_of_cell.bit_length() - 1
        alias = self._num_aliases
        if not self._library.add_memory(self._pointer, address, size, cells, shift, alias, rank):
            raise ValueError(f"memory at {address:#x} overlaps with other memory")

    def begin(self, num_programs: int) -> None:
        """So many are added next; what was run before is behind them. A call counts as one."""
        self._next = int(self._library.begin_work(self._pointer, num_programs))
        self._end = self._next + num_programs

    def launch(
        self, prepared: Prepared, rank: int, before: Sequence[int], *, gang: bool = False
    ) -> int:
        """Add a launch behind those ``before``; its number. ``gang``: together."""
        kernel = self._kernel(prepared)
        values = bytearray()
        for (_, offset, size), value in zip(
            prepared.kernel.parameters, prepared.values, strict=True
        ):
            values += bytes(offset - len(values))
            values += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        sizes = prepared.grid, prepared.num_warps
        return self._add(ctypes.addressof(kernel), rank, sizes, bytes(values), before, gang)

    def call(self, function: Callable[[], None], rank: int, before: Sequence[int]) -> int:
        """Add what the host does in stream order; it says what it accesses by ``touch``."""
        number = self._add(None, rank, (1, 1), b"", before, False)
        self._host[number] = function
        return number

    def touch(
        self, address: int, size: int, what: str, *, writes: bool, strong: bool = False
    ) -> None:
        """Within a ``call``: the host reads or writes memory of its rank."""
        site = self._site(what)
        arguments = address, size, 2 if writes else 1, 3 if strong else 0, site
        if not self._library.host_access(self._pointer, *arguments):
            raise ValueError(f"{what}: no memory of the rank at {address:#x}")

    def run(self) -> None:
        """Until all launches have ended. Raises MachineError where they do not."""
        while True:
            turn = Turn(self._library.run(self._pointer, _STEPS_AT_ONCE))
            if turn is Turn.FINISHED:
                return
            if turn is Turn.HOST:
                self._host[self._library.host_turn(self._pointer)]()
                self._library.end_host(self._pointer)
            elif turn is Turn.STUCK:
                raise MachineError(f"deadlock: {self._waiting()}")
            elif turn is Turn.FAILED:
                raise MachineError(self._failure())

    def has_stopped(self, rank: int) -> bool:
        """Whether a kernel has ended all work of the rank's device."""
        return bool(self._library.has_stopped(self._pointer, rank))

    @property
    def steps(self) -> int:
        """Instructions of warps that were executed."""
        return int(self._library.steps_of(self._pointer))

    def longest_warp(self, launch: int) -> int:
        """Instructions of the longest warp of a launch that has ended."""
        return int(self._library.longest_of(self._pointer, launch))

    def findings(self) -> list[Finding]:
        """Races, each pair of places once."""
        number = self._library.num_reports(self._pointer)
        if not number:
            return []
        reports = (_Report * number).from_address(self._library.reports_of(self._pointer))
        kinds = ("race", "no proxy fence")
        found = [
            Finding(
                kinds[each.kind],
                f"{_KINDS[each.first_kind & 7]} at {self._place(each.first)}",
                f"{_KINDS[each.second_kind & 7]} at {self._place(each.second)}",
            )
            for each in reports
        ]
        return sorted(set(found), key=str)

    def _add(
        self,
        kernel: int | None,
        rank: int,
        sizes: tuple[int, int],
        values: bytes,
        before: Sequence[int],
        gang: bool,
    ) -> int:
        grid, num_warps = sizes
        assert self._next + grid <= self._end, "more programs than were announced"
        order = (ctypes.c_int64 * max(1, len(before)))(*before)
        number = self._library.add_launch(
            self._pointer, kernel, rank, grid, num_warps, values, len(values), gang,
            ctypes.addressof(order), len(before), self._next,
        )  # fmt: skip
        self._next += grid
        return int(number)

    def _kernel(self, prepared: Prepared) -> _Kernel:
        parsed = prepared.kernel
        key = id(parsed), prepared.shared_bytes
        if key not in self._kernels:
            site = len(self._sites) * _SITE_BITS
            self._sites.append(parsed)
            self._kernels[key] = kernel_of(parsed, prepared.shared_bytes, site)
        return self._kernels[key][0]

    def _site(self, what: str) -> int:
        if what not in self._sites:
            self._sites.append(what)
        return self._sites.index(what) * _SITE_BITS

    def _place(self, site: int) -> str:
        where, position = self._sites[site // _SITE_BITS], site % _SITE_BITS
        if isinstance(where, str):
            return where
        instruction = where.code[min(position, len(where.code) - 1)]
        opcode = re.sub(r"^@\S+ ", "", instruction.text).split(" ")[0]
        return f"{where.lines[instruction.line]} in {where.name} [{opcode}]"

    def _failure(self) -> str:
        place, _, what = self._library.error_of(self._pointer).decode().partition(": ")
        site, rank, program, warp = (int(part) for part in place.split())
        return f"{what} at {self._place(site)}, rank {rank}, program {program}, warp {warp}"

    def _waiting(self) -> str:
        most = 1 << 16
        found = (ctypes.c_int64 * (4 * most))()
        number = self._library.where(self._pointer, ctypes.addressof(found), most)
        if not number:
            return "nothing runs, and nothing can start"
        rows = [found[4 * n : 4 * n + 4] for n in range(number)]
        places = {f"rank {rank}: {self._place(site).split(' [')[0]}" for site, rank, _, _ in rows}
        return f"{number} warps go round in {', '.join(sorted(places)[:8])}"


def kernel_of(parsed: ParsedKernel, shared_bytes: int, site: int = 0) -> tuple[_Kernel, Any]:
    """A kernel as machine.c reads it, and what has to be kept for as long."""
    code = encoded(parsed)
    constants = np.array(parsed.constants, dtype=np.uint64)
    kernel = _Kernel(
        code.ctypes.data, len(code), parsed.first_constant + len(constants), shared_bytes,
        site, constants.ctypes.data, parsed.first_constant, len(constants),
    )  # fmt: skip
    return kernel, (code, constants)


_encoded: dict[int, tuple[ParsedKernel, Any]] = {}


def encoded(parsed: ParsedKernel) -> Any:
    """The kernel's code as machine.c reads it."""
    if id(parsed) in _encoded:
        return _encoded[id(parsed)][1]
    code = np.zeros(len(parsed.code), dtype=_INSTRUCTION)
    number = parsed.registers.get

    def numbers(names: Sequence[str | None], width: int) -> list[int]:
        found = [-1 if name is None else number(name, -1) for name in names]
        return found + [-1] * (width - len(found))

    for row, each in zip(code, parsed.code, strict=True):
        row["operation"] = OPERATIONS[each.operation]
        row["guard"] = -1 if each.guard is None else parsed.registers[each.guard]
        row["targets"], row["sources"] = numbers(each.targets, 4), numbers(each.sources, 5)
        row["negated"], row["immediate"] = each.is_negated, each.immediate
        for name in ("goes_to", "meets", "space", "order", "strength"):
            row[name] = getattr(each, name)
        for name in ("num_bytes", "count", "kind", "is_signed"):
            row[name] = getattr(each, name)
    _encoded[id(parsed)] = parsed, code
    return code
