"""One PTX instruction at a time: opcode, modifiers and operands, all of which must be known."""

import re

from tests.emulated_gpu.kernels.flow import Instruction
from tests.emulated_gpu.kernels.library import OPERATIONS

__all__ = ["Decoder", "PtxError"]

_SPACES = {"global": 0, "shared": 1, "shared::cta": 1}
_STRENGTHS = {"cta": 1, "gpu": 2, "sys": 3}
_ORDERS = {"relaxed": 0, "acquire": 1, "release": 2, "acq_rel": 3, "volatile": 0}
_FENCES = {"acquire": 1, "release": 2, "acq_rel": 3, "sc": 3}  # sc orders more than is checked
_COMBINATIONS = ("add", "or", "and", "xor", "min", "max", "exch", "cas")
_SHUFFLES = ("up", "down", "bfly", "idx")
_SPECIALS = ("%tid.x", "%ctaid.x", "%ntid.x", "%nctaid.x", "%laneid", "%globaltimer", "%clock64")
_VOTES = ("ballot", "any", "all")
_REGISTER = re.compile(r"(%[a-z]+)(\d+)$")
_REGISTERS = re.compile(r"(%[a-z]+)<(\d+)>$")
_NUMBER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)U?$")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+")
_OPCODE = re.compile(r"([a-z][\w:]*(?:\.[\w:]+)*)\s*(.*)$", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]$")
_DECLARATION = re.compile(r"\.reg \.(\w+)\s+(.*)$")
_REGISTER_TYPES = {"pred", "b16", "b32", "b64", "u16", "u32", "u64", "s32", "s64"}
_BARRIERS = ("bar.sync", "barrier.sync.aligned", "barrier.cta.sync.aligned")
_MINUS_ONE = (1 << 64) - 1


class PtxError(ValueError):
    """PTX that is not understood; the message quotes it."""


class Decoder:
    """Of one kernel: it knows registers, constants and parameters by name."""

    def __init__(self, parameters: dict[str, tuple[int, int]]) -> None:
        """``parameters``: offset and size in bytes of each."""
        self._parameters = parameters
        self._scopes: list[dict[str, str]] = [{}]
        self._num_scopes = 0
        self._numbers_of: dict[str, int] = {}  # of registers, by the beginning of their names
        self.constants: dict[int, str] = {}  # names of registers that hold them

    def open_scope(self) -> None:
        """Registers that are declared from now on hide those of the same name."""
        self._num_scopes += 1
        self._scopes.append({})

    def close_scope(self) -> None:
        """And are forgotten here."""
        self._scopes.pop()

    def declare(self, text: str) -> None:
        """A directive within the kernel."""
        if text.startswith((".pragma", ".maxntid")):
            return
        if text.startswith(".local"):  # a stack; whatever uses it is not known
            return
        found = _DECLARATION.match(text)
        if not found or found[1] not in _REGISTER_TYPES:
            raise PtxError(text)
        for name in (part.strip() for part in found[2].split(",")):
            if registers := _REGISTERS.match(name):
                self._numbers_of[registers[1]] = int(registers[2])
            else:
                self._scopes[-1][name] = f"{name}'{self._num_scopes}"

    def decode(self, text: str, line: int) -> Instruction:
        """Raises PtxError for what is not known."""
        rest, guard, negated = text, None, False
        if found := _GUARD.match(rest):
            guard, negated = self._register(found[2]), bool(found[1])
            rest = rest[found.end() :]
        parts = _OPCODE.match(rest)
        if not parts:
            raise PtxError(text)
        opcode, operands = parts[1].split("."), _operands(parts[2])
        try:
            made = self._decode(opcode, operands)
        except (PtxError, ValueError, KeyError, IndexError) as error:
            raise PtxError(f"{text!r} is not known: {error}") from error
        made.text, made.line = " ".join(text.split()), line
        made.guard, made.is_negated = guard, negated
        return made

    def _decode(self, opcode: list[str], operands: list[str]) -> Instruction:
        first = opcode[0]
        if first in ("ld", "st", "atom", "red") and opcode[1] != "param":
            return self._memory(opcode, operands)
        decoders = {
            "bra": self._branch, "ret": self._plain, "exit": self._plain, "bar": self._barrier,
            "barrier": self._barrier, "fence": self._fence, "shfl": self._shuffle,
            "redux": self._reduce, "vote": self._vote, "match": self._match, "ld": self._parameter,
            "nanosleep": self._sleep, "trap": self._plain,
            "ldmatrix": self._matrix, "stmatrix": self._matrix,
        }  # fmt: skip
        if first in decoders:
            return decoders[first](opcode, operands)
        if first == "mov" and (operands[0].startswith("{") or operands[1].startswith("{")):
            return self._pack(opcode, operands)
        if first == "mov" and operands[1] in _SPECIALS:
            kind = _SPECIALS.index(operands[1])
            return Instruction("", 0, "special", targets=[self._register(operands[0])], kind=kind)
        return self._arithmetic(opcode, operands)

    def _arithmetic(self, opcode: list[str], operands: list[str]) -> Instruction:
        name = "_".join(opcode)
        if opcode[0] in ("selp", "mov") and opcode[1] != "pred":
            name = f"{opcode[0]}_b{int(opcode[1][1:])}"
        if name not in OPERATIONS:
            raise PtxError("no such operation")
        registers = [self._register(each) for each in operands]
        if len(registers) > 4:
            raise PtxError("too many operands")
        return Instruction("", 0, name, targets=registers[:1], sources=registers[1:])

    def _memory(self, opcode: list[str], operands: list[str]) -> Instruction:
        first, *modifiers, kind = opcode
        made = Instruction("", 0, {"ld": "load", "st": "store"}.get(first, "atom"))
        seen = set()
        for modifier in modifiers:
            if modifier in _SPACES:
                made.space, role = _SPACES[modifier], "space"
            elif modifier in _STRENGTHS:
                made.strength, role = _STRENGTHS[modifier], "scope"
            elif modifier in _ORDERS or modifier == "weak":
                made.order, role = _ORDERS.get(modifier, 0), "order"
            elif modifier in ("v2", "v4") and made.operation != "atom":
                made.count, role = int(modifier[1]), "vector"
            elif modifier in _COMBINATIONS and made.operation == "atom":
                made.kind, role = _COMBINATIONS.index(modifier), "combination"
            else:
                raise PtxError(f"modifier .{modifier}")
            if role in seen:
                raise PtxError(f"modifier .{modifier} again")
            seen.add(role)
        if "space" not in seen or ("combination" in seen) != (made.operation == "atom"):
            raise PtxError("space or combination is missing")
        strong = [each for each in modifiers if each in _ORDERS]
        if made.operation == "atom":
            made.strength = made.strength or _STRENGTHS["gpu"]
        elif "volatile" in strong:
            made.strength = _STRENGTHS["sys"]
        elif bool(strong) != bool(made.strength):
            raise PtxError("order without scope, or the other way round")
        made.num_bytes, made.is_signed = int(kind[1:]) // 8, kind[0] == "s"
        self._memory_operands(made, first, operands)
        return made

    def _memory_operands(self, made: Instruction, first: str, operands: list[str]) -> None:
        targets = [] if first in ("st", "red") else [operands.pop(0)]
        base, made.immediate = self._address(operands.pop(0))
        values = [each for text in operands for each in _vector(text)]
        made.targets = [self._register(each) for text in targets for each in _vector(text)]
        made.sources = [base, *(self._register(each) for each in values)]
        if made.operation != "atom" and made.count != max(len(made.targets), len(values)):
            raise PtxError("operands do not fit the vector")
        if made.operation == "load":
            made.is_signed = made.is_signed and made.num_bytes < 8

    def _address(self, text: str) -> tuple[str | None, int]:
        found = _ADDRESS.match(text)
        if not found:
            raise PtxError(f"address {text!r}")
        return self._register(found[1]), int(found[2] or 0)

    def _parameter(self, opcode: list[str], operands: list[str]) -> Instruction:
        found = _ADDRESS.match(operands[1])
        if not found or len(opcode) != 3:
            raise PtxError("address of a parameter")
        offset = self._parameters[found[1]][0] + int(found[2] or 0)
        target = [self._register(operands[0])]
        size = int(opcode[2][1:]) // 8
        return Instruction("", 0, "parameter", targets=target, immediate=offset, num_bytes=size)

    def _branch(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode[1:] not in ([], ["uni"]):
            raise PtxError("kind of branch")
        return Instruction("", 0, "branch", label=operands[0])

    def _plain(self, opcode: list[str], operands: list[str]) -> Instruction:
        if len(opcode) > 1 or operands:
            raise PtxError("more than its name")
        return Instruction("", 0, "trap" if opcode == ["trap"] else "return")

    def _barrier(self, opcode: list[str], operands: list[str]) -> Instruction:
        if ".".join(opcode) in _BARRIERS:
            if operands != ["0"]:
                raise PtxError("only barrier 0 of all threads is known")
            return Instruction("", 0, "barrier")
        if opcode == ["bar", "warp", "sync"] and operands in (["-1"], ["0xffffffff"]):
            return Instruction("", 0, "warp_barrier")
        raise PtxError("kind of barrier")

    def _fence(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode == ["fence", "proxy", "alias"] and not operands:
            return Instruction("", 0, "fence_alias")
        if len(opcode) != 3 or operands or opcode[1] == "relaxed":
            raise PtxError("kind of fence")
        order, strength = _FENCES[opcode[1]], _STRENGTHS[opcode[2]]
        return Instruction("", 0, "fence", order=order, strength=strength)

    def _sleep(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode != ["nanosleep", "u32"]:
            raise PtxError("kind of sleep")
        return Instruction("", 0, "sleep")

    def _shuffle(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode[1] != "sync" or opcode[3] != "b32" or len(operands) != 5:
            raise PtxError("kind of shuffle")
        targets = [self._register(each) for each in operands[0].split("|")]
        sources = [self._register(each) for each in operands[1:]]
        kind = _SHUFFLES.index(opcode[2])
        return Instruction("", 0, "shuffle", targets=targets, sources=sources, kind=kind, count=4)

    def _reduce(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode[1] != "sync" or opcode[3] not in ("s32", "u32", "b32"):
            raise PtxError("kind of reduction")
        made = Instruction("", 0, "reduce", kind=_COMBINATIONS.index(opcode[2]), count=2)
        made.targets = [self._register(operands[0])]
        made.sources = [self._register(each) for each in operands[1:]]
        made.is_signed = opcode[3] == "s32"
        return made

    def _vote(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode[1] != "sync" or opcode[3] not in ("b32", "pred"):
            raise PtxError("kind of vote")
        made = Instruction("", 0, "vote", kind=_VOTES.index(opcode[2]), count=2)
        made.targets = [self._register(operands[0])]
        made.immediate = int(operands[1].startswith("!"))
        made.sources = [self._register(operands[1].lstrip("!")), self._register(operands[2])]
        return made

    def _match(self, opcode: list[str], operands: list[str]) -> Instruction:
        if opcode[1:3] != ["any", "sync"] or opcode[3] not in ("b32", "b64"):
            raise PtxError("kind of match")
        sources = [self._register(each) for each in operands[1:]]
        size = int(opcode[3][1:]) // 8
        target = [self._register(operands[0])]
        return Instruction("", 0, "match", targets=target, sources=sources, num_bytes=size, count=2)

    def _matrix(self, opcode: list[str], operands: list[str]) -> Instruction:
        if [*opcode[1:4], *opcode[5:]] != ["sync", "aligned", "m8n8", "shared", "b16"]:
            raise PtxError("kind of matrix")
        is_load = opcode[0] == "ldmatrix"
        values, address = operands if is_load else reversed(operands)
        base, offset = self._address(address)
        registers = [self._register(each) for each in _vector(values)]
        if len(registers) != int(opcode[4][1:]):
            raise PtxError("number of matrices")
        made = Instruction("", 0, "load_matrix" if is_load else "store_matrix", space=1)
        made.targets, made.sources = (registers, [base]) if is_load else ([], [base, *registers])
        made.immediate, made.count = offset, len(registers)
        return made

    def _pack(self, opcode: list[str], operands: list[str]) -> Instruction:
        targets = [self._register(each) for each in _vector(operands[0])]
        sources = [self._register(each) for each in _vector(operands[1])]
        count = max(len(targets), len(sources))
        name = "unpack" if operands[0].startswith("{") else "pack"
        if min(len(targets), len(sources)) != 1:
            raise PtxError("both sides are vectors")
        size = int(opcode[1][1:]) // 8 // count
        made = Instruction("", 0, name, targets=targets, sources=sources, num_bytes=size)
        made.count = count
        return made

    def _register(self, text: str) -> str | None:
        """The name of a register, also of one that holds a constant."""
        text = text.strip()
        if text == "_":
            return None
        if _NUMBER.match(text):
            return self._constant(int(text.rstrip("U"), 0))
        if text in ("global_smem",):
            return self._constant(0)
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        found = _REGISTER.match(text)
        if not found or int(found[2]) >= self._numbers_of.get(found[1], 0):
            raise PtxError(f"operand {text!r}")
        return text

    def _constant(self, value: int) -> str:
        return self.constants.setdefault(value & _MINUS_ONE, f"constant {value & _MINUS_ONE}")


def _operands(text: str) -> list[str]:
    """Between commas that are in no braces."""
    found, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            found.append(text[start:position].strip())
            start = position + 1
    return [*found, text[start:].strip()] if text.strip() else []


def _vector(text: str) -> list[str]:
    text = text.strip()
    if text.startswith("{"):
        return [part.strip() for part in text.strip("{}").split(",")]
    return [text]
