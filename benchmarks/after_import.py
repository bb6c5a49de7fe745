"""What a ``sitecustomize`` of benchmarks changes in a module, once Python has imported that."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _After(MetaPathFinder):
    """Stays until the module is imported: others may only look whether it is there."""

    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name, self._change = name, change
        self._looks = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._looks:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looks = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def after_import(name: str, change: Callable[[ModuleType], object]) -> None:
    """Call ``change`` with the module ``name`` right after its first import."""
    sys.meta_path.insert(0, _After(name, change))
