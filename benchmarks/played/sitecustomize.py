"""On PYTHONPATH, with the checkout: every process sees the instruction set that is played.

Python imports this module first. ``tests.support.instruction_sets`` says which set, once torch is
there; the switches of oneDNN, ATen and MKL come beside it (``benchmarks/expert_kernels.py``).
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_play(module: ModuleType) -> None:
            load(module)
            importlib.import_module("tests.support.instruction_sets")

        spec.loader.exec_module = load_and_play  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterTorch())
