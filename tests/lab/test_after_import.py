"""What benchmarks change in modules of a process that they start."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.after_import import after_import


def test_a_module_is_changed_when_imported_though_others_looked_for_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packages do that only want to know whether torch is there."""
    (tmp_path / "looked_for.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    changed: list[ModuleType] = []
    after_import("looked_for", changed.append)
    assert importlib.util.find_spec("looked_for") is not None
    assert not changed
    module = importlib.import_module("looked_for")
    assert changed == [module]
    del sys.modules["looked_for"]
    importlib.import_module("looked_for")
    assert changed == [module]
