"""The flow of a kernel: where branches lead, lanes meet again, and registers share a place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Instruction", "find_branches", "packed"]


@dataclass
class Instruction:
    """One instruction; registers by name until they are packed, None where there is none."""

    text: str
    line: int  # index into the lines of the kernel
    operation: str
    guard: str | None = None
    is_negated: bool = False
    targets: list[str | None] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    immediate: int = 0
    label: str = ""  # of a branch
    space: int = 0
    order: int = 0
    strength: int = 0
    num_bytes: int = 4
    count: int = 1
    kind: int = 0
    is_signed: bool = False
    goes_to: int = -1  # position that a branch leads to
    meets: int = -1  # where lanes that part here are together again; -1 at the end


def find_branches(code: list[Instruction], labels: dict[str, int]) -> None:
    """Where branches lead to, and where lanes meet again: the branch's immediate post-dominator."""
    for instruction in code:
        if instruction.operation == "branch":
            instruction.goes_to = labels[instruction.label]
    targets = {each.goes_to for each in code if each.operation == "branch"}
    ends = {n + 1 for n, each in enumerate(code) if each.operation in ("branch", "return")}
    starts = sorted(start for start in {0} | targets | ends if start < len(code))
    blocks = list(zip(starts, [*starts[1:], len(code)], strict=True))
    meets = _post_dominators(starts, {start: _followers(code, end - 1) for start, end in blocks})
    for start, end in blocks:
        code[end - 1].meets = meets[start]


def _followers(code: Sequence[Instruction], last: int) -> list[int]:
    """Positions that may come after ``last``; -1 the end."""
    instruction, found = code[last], []
    if instruction.operation == "branch":
        found.append(instruction.goes_to)
    if instruction.operation == "return":
        found.append(-1)
    if instruction.operation not in ("branch", "return") or instruction.guard is not None:
        found.append(last + 1 if last + 1 < len(code) else -1)
    return found


def _post_dominators(starts: list[int], followers: dict[int, list[int]]) -> dict[int, int]:
    """The nearest block that every way from a block goes through; -1 the end."""
    order = {start: position for position, start in enumerate(_from_the_end(starts, followers))}
    nearest: dict[int, int] = {-1: -1}

    def common(a: int, b: int) -> int:
        while a != b:
            while order[a] > order[b]:
                a = nearest[a]
            while order[b] > order[a]:
                b = nearest[b]
        return a

    order = {-1: -1, **order}
    changed = True
    while changed:
        changed = False
        for start in sorted(starts, key=order.__getitem__):
            known = [each for each in followers[start] if each in nearest]
            if not known:
                continue
            found = known[0]
            for other in known[1:]:
                found = common(found, other)
            if nearest.get(start) != found:
                nearest[start], changed = found, True
    return {start: nearest.get(start, -1) for start in starts}


def _from_the_end(starts: list[int], followers: dict[int, list[int]]) -> list[int]:
    """Blocks in reverse post-order of the reversed graph."""
    before: dict[int, list[int]] = {start: [] for start in [*starts, -1]}
    for start, after in followers.items():
        for each in after:
            before[each].append(start)
    found, seen, visits = [], set(), [(-1, False)]
    while visits:
        block, is_left = visits.pop()
        if is_left:
            found.append(block)
        elif block not in seen:
            seen.add(block)
            visits.append((block, True))
            visits += [(each, False) for each in before[block] if each not in seen]
    found.reverse()
    return [block for block in found if block != -1] + [s for s in starts if s not in seen]


def packed(code: list[Instruction], constants: set[str]) -> dict[str, int]:
    """A number for every register; two share one where neither is needed while the other is.

    A register is needed from its first to its last mention, and throughout every loop in which it
    is mentioned. Lanes that part write only their own, so one side keeps what the other needs.
    """
    ranges: dict[str, list[int]] = {}
    for position, instruction in enumerate(code):
        for register in (*instruction.targets, *instruction.sources, instruction.guard):
            if register is not None and register not in constants:
                ranges.setdefault(register, [position, position])[1] = position
    loops = sorted(
        (i.goes_to, n) for n, i in enumerate(code) if i.operation == "branch" and i.goes_to <= n
    )
    changed = True
    while changed:
        changed = False
        for start, end in loops:
            for span in ranges.values():
                if span[0] <= end and span[1] >= start and (span[0] > start or span[1] < end):
                    span[:] = [min(span[0], start), max(span[1], end)]
                    changed = True
    return _numbered(ranges)


def _numbered(ranges: dict[str, list[int]]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    highest = 0
    for register, (start, end) in sorted(ranges.items(), key=lambda item: item[1][0]):
        while busy and busy[0][0] < start:
            free.append(busy.pop(0)[1])
        if not free:
            free.append(highest)
            highest += 1
        numbers[register] = free.pop()
        busy.append((end, numbers[register]))
        busy.sort()
    return numbers
