"""What an adapter touches of its engine, derived from the source of both; neither is imported.

An adapter touches what it imports and what its hooks name and, of the classes and functions that
stand there or that those modules import, every member and parameter whose name it reads, passes or
spells. Which of these there are, a release tells that the adapter was verified with. So another
release is compared with that one name by name: where one is gone, look at the adapter.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

__all__ = ["Adapter", "EngineSource", "moved"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_PACKAGE = Path(__file__).resolve().parents[2] / "ultraep_serve"


class Adapter:
    """The source of the adapter and launcher of ``engine``, and what all adapters share."""

    def __init__(self, engine: str, root: Path = _PACKAGE) -> None:
        found = (f"engines/{engine}/*", "engines/common/*", f"launcher/{engine}", "launcher/engine")
        paths = [path for pattern in found for path in root.glob(f"{pattern}.py")]
        self._nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_bytes()))]
        self.engine = engine

    @cached_property
    def imported(self) -> set[str]:
        """Dotted names in the engine that are imported."""
        found = set[str]()
        for node in self._nodes:
            match node:
                case ast.ImportFrom(module=str(module)):
                    found |= {f"{module}.{alias.name}" for alias in node.names}
                case ast.Import():
                    found |= {alias.name for alias in node.names}
        return {name for name in found if name.partition(".")[0] == self.engine}

    @cached_property
    def spelled(self) -> set[str]:
        """Strings that begin as dotted names in the engine: targets of hooks, and others."""
        texts = {text for node in self._nodes for text in _text(node)}
        return {text for text in texts if text.startswith(f"{self.engine}.")}

    @cached_property
    def names(self) -> set[str]:
        """Names that are read of something, passed with an argument, or part of a string."""
        found = set[str]()
        for node in self._nodes:
            match node:
                case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                    found.add(name)
            for text in _text(node):
                found |= {part.lstrip("-").replace("-", "_") for part in text.split(".")}
        return {name for name in found if name.isidentifier() and not name.startswith("__")}


class EngineSource:
    """The Python source of an engine."""

    def __init__(self, root: Path) -> None:
        """``root`` is the folder that holds the engine's top-level package."""
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}

    def has(self, target: str) -> bool:
        """Whether a package, a module, or something in a module bears this dotted name.

        Raises SyntaxError where this Python cannot read the engine.
        """
        owner, _, name = target.rpartition(".")
        if self._root.joinpath(*target.split(".")).is_dir() or self._module(target):
            return True
        tree = self._module(owner) if owner else None
        return bool({name, "*"} & _bound(tree)) if tree else bool(owner) and self.has(owner)

    def touched(self, adapter: Adapter) -> dict[str, set[str]]:
        """Of classes and functions, by name, the members and parameters that ``adapter`` names."""
        found, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        targets = adapter.imported | adapter.spelled
        called = adapter.names | {target.rpartition(".")[2] for target in targets}
        for module in self._modules_near(targets, adapter.engine):
            for name, node in _definitions(module):
                if isinstance(node, ast.ClassDef):
                    found[name] |= _members(node) & adapter.names
                    bases[name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                elif node.name in called:
                    found[f"{name}()"] |= _parameters(node) & adapter.names
        for name in bases:
            found[name] = found[name].union(*(found.get(base, ()) for base in _all(bases, name)))
        return dict(found)

    def _modules_near(self, targets: set[str], engine: str) -> list[ast.Module]:
        """The modules that ``targets`` lie in, and those of the engine that these import."""
        parts = [target.split(".") for target in targets]
        named = targets | {".".join(part[:end]) for part in parts for end in range(2, len(part))}
        imported = {found for name in named for found in self._imported(name)}
        near = sorted(name for name in named | imported if name.partition(".")[0] == engine)
        return [tree for tree in map(self._module, near) if tree is not None]

    def _imported(self, module: str) -> Iterator[str]:
        parts = module.split(".")
        is_package = self._path(module).name == "__init__.py"
        for node in ast.walk(self._module(module) or ast.Module([], [])):
            if isinstance(node, ast.ImportFrom):
                above = parts[: len(parts) - node.level + is_package] if node.level else []
                origin = ".".join([*above, *filter(None, [node.module])])
                yield from (origin, *(f"{origin}.{alias.name}" for alias in node.names))

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._path(name)
            self._modules[name] = ast.parse(path.read_bytes()) if path.is_file() else None
        return self._modules[name]

    def _path(self, module: str) -> Path:
        base = self._root.joinpath(*module.split("."))
        package = base / "__init__.py"
        return package if package.is_file() else base.with_suffix(".py")


def moved(adapter: Adapter, verified: EngineSource, other: EngineSource) -> dict[str, str]:
    """What of ``verified`` is touched by ``adapter`` and not in ``other``, by name, in words.

    Raises SyntaxError where this Python cannot read one of them.
    """
    targets = adapter.imported | {target for target in adapter.spelled if verified.has(target)}
    found = {target: "is gone" for target in targets if not other.has(target)}
    before, after = verified.touched(adapter), other.touched(adapter)
    is_left = set().union(*after.values())
    lost = defaultdict[str, list[str]](list)
    for place, names in sorted(before.items()):
        for name in names - after.get(place, set()):
            if place in after or name not in is_left:
                lost[name].append(place)
    return dict(sorted(found.items())) | {
        name: f"is gone from {', '.join(places)}" for name, places in sorted(lost.items())
    }


def _text(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        yield node.value


def _definitions(tree: ast.Module) -> Iterator[tuple[str, _Definition]]:
    """The classes and functions of a module; methods by ``Class.method``."""
    yield from ((node.name, node) for node in _statements(tree) if isinstance(node, _FUNCTIONS))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node
            methods = (part for part in node.body if isinstance(part, _FUNCTIONS))
            yield from ((f"{node.name}.{method.name}", method) for method in methods)


def _all(bases: dict[str, set[str]], name: str) -> set[str]:
    """The names of all classes that class ``name`` is made from, directly or not."""
    found, last = set[str](), {name}
    while last:
        last = {base for each in last for base in bases.get(each, ())} - found
        found |= last
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """The names that a class's body, or a method on ``self``, gives something to."""
    found = _bound(node)
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = node.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _bound(node: ast.Module | ast.ClassDef) -> set[str]:
    """The names that the body of a module or class gives something to."""
    found = set[str]()
    for statement in _statements(node):
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
            case ast.Assign(targets=targets):
                parts = (part for target in targets for part in ast.walk(target))
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, those under conditions too, not those of functions."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt):
            yield part
        if isinstance(part, ast.If | ast.Try | ast.With | ast.For | ast.ExceptHandler):
            yield from _statements(part)
