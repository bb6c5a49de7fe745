"""PTX text -> a kernel that the machine executes: instructions, their lines, and parameters."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.emulated_gpu.kernels.decode import Decoder, PtxError
from tests.emulated_gpu.kernels.flow import Instruction, find_branches, packed

__all__ = ["ParsedKernel", "PtxError", "parse"]

_ENTRY = re.compile(
    r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{(.*?)^\}", re.MULTILINE | re.DOTALL
)
_LOC = re.compile(
    r"\.loc\s+(\d+) (\d+) (\d+)(?:, function_name \S+, inlined_at (\d+) (\d+) (\d+))?"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_PARAMETER = re.compile(r"\.param \.([a-z])(\d+)(?: \.ptr[^,]*?)? (\w+)$")


@dataclass(frozen=True)
class ParsedKernel:
    """What the machine needs of one kernel."""

    name: str
    code: list[Instruction]
    lines: list[str]  # places in the source, innermost first
    parameters: list[tuple[str, int, int]]  # name, offset and size in bytes
    constants: list[int]  # of the registers from ``first_constant`` on
    first_constant: int
    registers: dict[str, int]  # packed number of each
    num_warps: int


def parse(ptx: str) -> ParsedKernel:
    """The one kernel of a module. Raises PtxError for what is not known."""
    return _Parser(ptx).kernel()


class _Parser:
    def __init__(self, ptx: str) -> None:
        self._ptx = ptx
        names = {int(n): name or folder for n, folder, name in _FILE.findall(ptx)}
        self._files = {number: name.rpartition("/")[2] for number, name in names.items()}
        self._lines: list[str] = []
        self._line_numbers: dict[str, int] = {}
        self._code: list[Instruction] = []
        self._labels: dict[str, int] = {}
        self._parameters: dict[str, tuple[int, int]] = {}
        self._decoder = Decoder(self._parameters)

    def kernel(self) -> ParsedKernel:
        found = _ENTRY.search(self._ptx)
        if not found:
            raise PtxError("no kernel in the module")
        name, parameters, threads, body = found.groups()
        self._declare_parameters(parameters)
        line, in_assembly, pinned = self._line("unknown"), False, False
        for kind, text in _statements(body):
            if kind == "loc":
                # within inline assembly the compiler counts lines that are none of the source's
                if not (in_assembly and pinned):
                    line, pinned = self._line(self._place(text)), True
            elif kind == "assembly":
                in_assembly, pinned = text == "begin", False
            elif kind == "label":
                self._labels[text] = len(self._code)
            elif kind == "{":
                self._decoder.open_scope()
            elif kind == "}":
                self._decoder.close_scope()
            elif text.startswith("."):
                self._decoder.declare(text)
            else:
                self._code.append(self._decoder.decode(text, line))
        find_branches(self._code, self._labels)
        registers = packed(self._code, set(self._decoder.constants.values()))
        first = 1 + max((n for n in registers.values()), default=-1)
        for position, register in enumerate(self._decoder.constants.values()):
            registers[register] = first + position
        offsets = [(name, *where) for name, where in self._parameters.items()]
        values = list(self._decoder.constants)
        return ParsedKernel(
            name, self._code, self._lines, offsets, values, first, registers, int(threads) // 32
        )

    def _line(self, place: str) -> int:
        if place not in self._line_numbers:
            self._line_numbers[place] = len(self._lines)
            self._lines.append(place)
        return self._line_numbers[place]

    def _place(self, text: str) -> str:
        found = _LOC.match(text)
        if not found:
            raise PtxError(text)
        file, line, _, outer_file, outer_line, _ = found.groups()
        place = f"{self._files.get(int(file), file)}:{line}"
        if outer_file:
            place += f" (from {self._files.get(int(outer_file), outer_file)}:{outer_line})"
        return place

    def _declare_parameters(self, text: str) -> None:
        offset = 0
        for declaration in filter(None, (part.strip() for part in text.split(","))):
            found = _PARAMETER.match(declaration)
            if not found:
                raise PtxError(declaration)
            size = int(found[2]) // 8
            offset = -(-offset // size) * size
            self._parameters[found[3]] = offset, size
            offset += size


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Kind and text of what stands in a kernel's body, in order."""
    pending = ""
    for raw in body.split("\n"):
        if "begin inline asm" in raw or "end inline asm" in raw:
            yield "assembly", raw.split()[1]
            continue
        line = re.sub(r"//.*", "", raw).strip()
        if line.startswith(".loc") and not line.startswith(".local"):
            yield "loc", line
            continue
        if not pending and (label := re.match(r"(\$?\w+):$", line)):
            yield "label", label[1]
            continue
        pending = f"{pending} {line}".strip()
        while pending:
            if pending[0] in "{}":
                yield pending[0], ""
                pending = pending[1:].strip()
            elif ";" in pending:
                statement, _, pending = pending.partition(";")
                yield "statement", statement.strip()
                pending = pending.strip()
            else:
                break
    if pending:
        raise PtxError(f"{pending!r} has no end")
