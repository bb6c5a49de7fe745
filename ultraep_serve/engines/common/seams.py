"""Where an adapter touches its engine, and whether an engine still has all of it.

A *seam* is one such place: a class, method, function, setting or attribute of the engine's, with
what the adapter expects of it. Each adapter lists its seams once (``seams.py``); the adapter at
load, ``doctor``, ``make engine-next`` and the docs all go by that list.

An engine is read, not imported: its source tells the same in every process, in a second, and also
where it is an unpacked package that could not run here.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from ultraep_serve.engines.common.launch import package_folder
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.versions import NewerEngine, Package

__all__ = ["EngineSource", "Seam", "moved_here", "require_engine", "why_not_loaded"]

_Node: TypeAlias = ast.stmt | ast.Module
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Seam:
    """One place where an adapter touches its engine, and what it expects there: names."""

    target: str  # "module", "module:name" or "module:Class.method"
    purpose: str
    parameters: str = ""  # exactly, in this order: the adapter stands in its place
    passed: str = ""  # by the adapter, in this order; it must ask for no others
    attributes: str = ""  # that a module, or instances of a class, have
    mentions: str = ""  # names and strings that its source uses


@dataclass(frozen=True)
class _Found:
    """A definition and the module that it stands in."""

    module: str
    node: _Node


class EngineSource:
    """The Python source of an engine."""

    def __init__(self, root: Path) -> None:
        """``root`` is the folder that holds the engine's top-level package."""
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}
        self._definitions: dict[tuple[str, str], _Found | None] = {}

    def moved(self, seams: Sequence[Seam]) -> dict[str, str]:
        """What is not as expected, by the seam's target."""
        problems = ((seam.target, " and ".join(self._problems(seam))) for seam in seams)
        return {target: problem for target, problem in problems if problem}

    def _problems(self, seam: Seam) -> Iterator[str]:
        module, _, path = seam.target.partition(":")
        found = self._find(module, path)
        if found is None:
            yield "is gone"
            return
        if seam.parameters or seam.passed:
            taken = self._parameters(found)
            problem = "is no function" if taken is None else _wrong_parameters(taken, seam)
            if problem is not None:
                yield problem
        if missing := set(seam.attributes.split()) - self._attributes(found):
            yield f"has no {', '.join(sorted(missing))}"
        if missing := set(seam.mentions.split()) - set(_mentioned(found.node)):
            yield f"does not use {', '.join(sorted(missing))}"

    def _find(self, module: str, path: str) -> _Found | None:
        if (module, path) not in self._definitions:
            self._definitions[module, path] = None  # where modules import each other in a circle
            tree = self._module(module)
            found = None if tree is None else _Found(module, tree)
            for name in path.split(".") if path else ():
                found = found and self._member(found, name)
            self._definitions[module, path] = found
        return self._definitions[module, path]

    def _member(self, owner: _Found, name: str) -> _Found | None:
        """What ``name`` stands for in a module, or in a class and those that it is made from."""
        for statement in _statements(owner.node):
            bound = _bound(statement)
            if isinstance(statement, ast.ImportFrom) and (name in bound or "*" in bound):
                if found := self._imported(owner, statement, name):
                    return found
            elif name in bound:
                return _Found(owner.module, statement)
        if isinstance(owner.node, ast.ClassDef):
            inherited = (self._member(base, name) for base in self._bases(owner))
            return next((found for found in inherited if found is not None), None)
        return None

    def _imported(self, owner: _Found, statement: ast.ImportFrom, name: str) -> _Found | None:
        parts = owner.module.split(".")
        if statement.level:
            is_package = self._path(owner.module).name == "__init__.py"
            parts = parts[: len(parts) - statement.level + is_package]
            module = ".".join([*parts, *filter(None, [statement.module])])
        else:
            module = statement.module or ""
        originals = {alias.asname or alias.name: alias.name for alias in statement.names}
        original = originals.get(name, name)
        return self._find(module, original) or self._find(f"{module}.{original}", "")

    def _bases(self, owner: _Found) -> Iterator[_Found]:
        """The engine's own classes that a class is made from, directly."""
        assert isinstance(owner.node, ast.ClassDef)
        for base in owner.node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            found = self._find(owner.module, ast.unparse(expression))
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found

    def _attributes(self, found: _Found) -> set[str]:
        names = {name for statement in _statements(found.node) for name in _bound(statement)}
        if isinstance(found.node, ast.ClassDef):
            names |= set(_set_on_self(found.node))
            for base in self._bases(found):
                names |= self._attributes(base)
        return names

    def _parameters(self, found: _Found) -> dict[str, bool] | None:
        """Parameters in order, and whether they may be left out; of a class those to make one."""
        if isinstance(found.node, ast.ClassDef):
            init = self._member(found, "__init__")
            if init is None:
                return dict(self._fields(found))
            taken = self._parameters(init) or {}
            return dict(list(taken.items())[1:])  # without self
        if not isinstance(found.node, _Function):
            return None
        given = found.node.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        first_default = len(names) - len(given.defaults)
        taken = {name: index >= first_default for index, name in enumerate(names)}
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            taken[argument.arg] = default is not None
        if given.vararg:
            taken[f"*{given.vararg.arg}"] = True
        if given.kwarg:
            taken[f"**{given.kwarg.arg}"] = True
        return taken

    def _fields(self, found: _Found) -> Iterator[tuple[str, bool]]:
        for base in self._bases(found):
            yield from self._fields(base)
        for statement in _statements(found.node):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id, statement.value is not None

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._path(name)
            self._modules[name] = ast.parse(path.read_bytes()) if path.is_file() else None
        return self._modules[name]

    def _path(self, module: str) -> Path:
        base = self._root.joinpath(*module.split("."))
        package = base / "__init__.py"
        return package if package.is_file() else base.with_suffix(".py")


def _wrong_parameters(taken: dict[str, bool], seam: Seam) -> str | None:
    if expected := seam.parameters.split():
        if list(taken) == expected:
            return None
        return f"takes ({', '.join(taken)}), not ({', '.join(expected)})"
    passed = seam.passed.split()
    takes_any = any(name.startswith("**") for name in taken)
    if missing := [name for name in passed if name not in taken and not takes_any]:
        return f"does not take {', '.join(missing)}"
    known = [name for name in taken if name in passed]
    if known != [name for name in passed if name in taken]:
        return f"takes {', '.join(known)} in another order"
    needed = [name for name, is_optional in taken.items() if not is_optional]
    if new := [name for name in needed if name not in (*passed, "self", "cls")]:
        return f"needs {', '.join(new)}"
    return None


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under conditions too, not those of functions."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt):
            yield part
        if isinstance(part, ast.If | ast.Try | ast.With | ast.For | ast.ExceptHandler):
            yield from _statements(part)


def _bound(statement: ast.stmt) -> list[str]:
    """The names that ``statement`` gives something to."""
    if isinstance(statement, ast.ClassDef | _Function):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        targets = [part for target in statement.targets for part in ast.walk(target)]
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        targets = []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    """The names that methods of a class give something to on what they are called for."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _mentioned(node: _Node) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)):
                yield text


@cache
def moved_here(module: str, seams: tuple[Seam, ...]) -> tuple[str, ...]:
    """What is not as expected in the engine that is installed here as ``module``, in words.

    Raises ConfigError where it is not.
    """
    moved = EngineSource(package_folder(module).parent).moved(seams)
    return tuple(f"{target} {problem}" for target, problem in moved.items())


def require_engine(
    package: Package, version: str, seams: tuple[Seam, ...], newer: NewerEngine
) -> str:
    """Raise UnsupportedError unless ``version``, which is installed here, can be balanced.

    A release that was not verified is refused, or with ``newer`` "try" accepted if it came after
    all that were and every seam is as it was; then what to tell users is returned. In a verified
    one this looks only at seams that the adapter stands in.
    """
    is_tried = newer == "try" and package.is_newer(version)
    if not is_tried:
        package.require(version)
        seams = tuple(seam for seam in seams if seam.parameters)
    if moved := moved_here(package.module, seams):
        raise UnsupportedError(
            f"{package.engine} {version} is not as this adapter needs it: {', and '.join(moved)}; "
            f"install {package.requirement}"
        )
    if not is_tried:
        return ""
    return (
        f"{package.engine} {version} has not been verified on {package.runs_on} (only "
        f"{', '.join(package.releases)} has); it is tried, as all {len(seams)} places that the "
        "adapter touches are as it knows them"
    )


def why_not_loaded(package: Package, seams: tuple[Seam, ...], error: Exception) -> UnsupportedError:
    """Why importing the adapter gave ``error``: what has moved in the engine, if anything."""
    reason = ", and ".join(moved_here(package.module, seams)) or str(error)
    return UnsupportedError(f"this {package.engine} is not one that can be balanced: {reason}")
