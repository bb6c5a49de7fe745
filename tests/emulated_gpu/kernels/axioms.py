"""The axioms of PTX's memory model over small programs, for a solver: what may a read return?

A program is a list of events of threads. The solver looks for an execution that the axioms allow
(PTX ISA, memory consistency model) and in which all that ``claim`` says holds; a protocol is right
where there is none. Read-modify-writes, scopes, fences, barriers and proxies are modelled; data
that depend on other data and out-of-thin-air values are not.
"""

from dataclasses import dataclass
from typing import Any

import z3

__all__ = ["Event", "allows"]

_SCOPES = ("weak", "cta", "gpu", "sys")


@dataclass(frozen=True)
class Event:
    """What one thread does; threads do theirs in the order of the program."""

    thread: str  # "rank.program.thread"
    kind: str  # "read", "write", "update", "fence", "barrier", "proxy"
    place: str = ""  # what is read or written; the name of a barrier
    value: int = 0  # that is written
    returns: int | None = None  # what a read must return in the execution that is looked for
    order: str = ""  # "acquire", "release" or "acq_rel", of an access or a fence
    scope: str = "weak"
    alias: str = ""  # the address through which it accesses

    @property
    def reads(self) -> bool:
        return self.kind in ("read", "update")

    @property
    def writes(self) -> bool:
        return self.kind in ("write", "update")

    def includes(self, other: "Event") -> bool:
        """Whether the other's thread is in this scope."""
        mine, theirs = self.thread.split("."), other.thread.split(".")
        shared = {"weak": 3, "cta": 2, "gpu": 1, "sys": 0}[self.scope]
        return self.scope != "weak" and mine[:shared] == theirs[:shared]


def allows(program: list[Event]) -> bool:
    """Whether some execution returns to every read what it must return."""
    return _Model(program).has_execution()


class _Model:
    def __init__(self, program: list[Event]) -> None:
        places = sorted({each.place for each in program if each.reads or each.writes})
        self._events = [Event("init.0.0", "write", place, 0) for place in places] + program
        self._all = range(len(self._events))
        self._solver = z3.Solver()
        names = ("from", "coherent", "sees", "behind", "fenced")
        self._of: dict[str, Any] = {
            name: [[z3.Bool(f"{name} {a} {b}") for b in self._all] for a in self._all]
            for name in names
        }

    def has_execution(self) -> bool:
        """Raises RuntimeError where the solver does not know."""
        self._values()
        self._coherence()
        self._observation()
        self._synchronisation()
        self._closure()
        self._causality()
        found = self._solver.check()
        if found == z3.unknown:
            raise RuntimeError(self._solver.reason_unknown())
        return bool(found == z3.sat)

    def _pairs(self) -> list[tuple[int, int, Event, Event]]:
        return [
            (a, b, self._events[a], self._events[b]) for a in self._all for b in self._all if a != b
        ]

    def _before(self, a: int, b: int) -> bool:
        """Program order; what was there at first comes before everything."""
        first, second = self._events[a], self._events[b]
        return a < b and (first.thread == second.thread or first.thread == "init.0.0")

    def _is_strong(self, a: Event, b: Event) -> bool:
        """Morally strong: each in the other's scope."""
        return a.includes(b) and b.includes(a)

    def _values(self) -> None:
        """Every read returns one write's value; the one that is wanted."""
        read_from = self._of["from"]
        for b, reader in enumerate(self._events):
            if not reader.reads:
                continue
            writers = [a for a, each in enumerate(self._events)
                       if a != b and each.writes and each.place == reader.place]  # fmt: skip
            self._solver.add(z3.PbEq([(read_from[a][b], 1) for a in writers], 1))
            for a in writers:
                if reader.returns is not None and self._events[a].value != reader.returns:
                    self._solver.add(z3.Not(read_from[a][b]))

    def _coherence(self) -> None:
        """Writes to a place are in an order; an update comes right behind what it read."""
        order = self._of["coherent"]
        writes = [n for n in self._all if self._events[n].writes]
        alike = {(a, b) for a in writes for b in writes
                 if a != b and self._events[a].place == self._events[b].place}  # fmt: skip
        for a, b in alike:
            self._solver.add(z3.Xor(order[a][b], order[b][a]))
            if self._before(a, b):
                self._solver.add(order[a][b])
            for c in writes:
                if (b, c) in alike and (a, c) in alike:
                    self._solver.add(z3.Implies(z3.And(order[a][b], order[b][c]), order[a][c]))
            if self._events[b].kind == "update":
                self._solver.add(z3.Implies(self._of["from"][a][b], order[a][b]))
                for c in writes:
                    if (a, c) in alike and c != b:
                        between = z3.And(order[a][c], order[c][b])
                        self._solver.add(z3.Implies(self._of["from"][a][b], z3.Not(between)))

    def _observation(self) -> None:
        """A strong read sees a strong write, also through updates between them."""
        sees = self._of["sees"]
        for a, b, first, second in self._pairs():
            if first.writes and second.reads and first.place == second.place:
                if self._is_strong(first, second):
                    self._solver.add(z3.Implies(self._of["from"][a][b], sees[a][b]))
                for c in self._all:
                    if self._events[c].kind == "update" and c not in (a, b):
                        self._solver.add(z3.Implies(z3.And(sees[a][c], sees[c][b]), sees[a][b]))

    def _patterns(self, order: str) -> list[tuple[int, int]]:
        """(access, event that orders): an access that releases or acquires, or one and a fence."""
        found = []
        for n, each in enumerate(self._events):
            accesses = each.writes if order == "release" else each.reads
            if not accesses or each.scope == "weak":
                continue
            if each.order in (order, "acq_rel"):
                found.append((n, n))
            for m, fence in enumerate(self._events):
                is_there = self._before(m, n) if order == "release" else self._before(n, m)
                if is_there and fence.kind == "fence" and fence.order in (order, "acq_rel"):
                    found.append((n, m))
        return found

    def _synchronisation(self) -> None:
        """Releases with the acquires that see them; barriers with each other."""
        behind = self._of["behind"]
        for write, released in self._patterns("release"):
            for read, acquired in self._patterns("acquire"):
                if self._is_strong(self._events[released], self._events[acquired]):
                    self._solver.add(
                        z3.Implies(self._of["sees"][write][read], behind[released][acquired])
                    )
        for a, b, first, second in self._pairs():
            if first.kind == second.kind == "barrier" and first.place == second.place:
                self._solver.add(behind[a][b])

    def _closure(self) -> None:
        """What lies behind what; and behind a proxy fence between them."""
        behind, fenced = self._of["behind"], self._of["fenced"]
        barriers = {n for n in self._all if self._events[n].kind == "barrier"}
        for a, b, _, _ in self._pairs():
            if self._before(a, b):
                self._solver.add(behind[a][b])
            for c in self._all:
                if c in (a, b):
                    continue
                both = z3.And(behind[a][c], behind[c][b])
                if not {a, b, c} <= barriers:
                    self._solver.add(z3.Implies(both, behind[a][b]))
                if self._events[c].kind == "proxy":
                    self._solver.add(z3.Implies(both, fenced[a][b]))

    def _causality(self) -> None:
        """Nothing that is read or ordered may contradict what lies behind what."""
        for a, b, first, second in self._pairs():
            if first.place != second.place or "barrier" in (first.kind, second.kind):
                continue
            if not ((first.writes or second.writes) and (first.reads or first.writes)):
                continue
            same = first.alias == second.alias or "init.0.0" in (first.thread, second.thread)
            ordered = self._of["behind" if same else "fenced"][a][b]
            if first.writes and second.writes:
                self._solver.add(z3.Implies(ordered, self._of["coherent"][a][b]))
            if first.reads and second.writes:  # a read does not see what comes behind it
                self._solver.add(z3.Implies(ordered, z3.Not(self._of["from"][b][a])))
                self._overwritten(a, b, ordered)
            if first.writes and second.reads:  # nor what was overwritten before it
                for c, other in enumerate(self._events):
                    if c not in (a, b) and other.writes and other.place == first.place:
                        stale = z3.And(self._of["from"][c][b], self._of["coherent"][c][a])
                        self._solver.add(z3.Implies(ordered, z3.Not(stale)))

    def _overwritten(self, read: int, write: int, ordered: Any) -> None:
        """What a read returns was written before whatever comes behind the read."""
        for c, other in enumerate(self._events):
            if c not in (read, write) and other.writes and other.place == self._events[read].place:
                seen = self._of["from"][c][read]
                before = self._of["coherent"][c][write]
                self._solver.add(z3.Implies(z3.And(ordered, seen), before))
