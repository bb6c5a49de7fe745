"""What an adapter touches of its engine, read from source; no engine runs."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.touched import Adapter, EngineSource, moved

ADAPTER = {
    "engines/engine/seams.py": """
from engine.layers import Experts
from engine.layers.moe import run as run_experts

HOOK = "engine.workers.Worker.warm_up"

def use(layer):
    return run_experts(x=layer.top_k, ids=getattr(layer, "is_quantised"))
""",
}
ENGINE = {
    "engine/__init__.py": "",
    "engine/layers/__init__.py": "from .moe import Experts\n",
    "engine/layers/base.py": "class Layer:\n    is_quantised = False\n",
    "engine/layers/moe.py": """
from engine.layers.base import Layer

try:
    from engine.fast import run
except ImportError:
    def run(x, ids): ...

class Experts(Layer):
    def __init__(self):
        self.top_k, self.other = 1, 2
""",
    "engine/workers.py": "class Worker:\n    def warm_up(self): ...\n",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write files below a new folder, with one text in one of them replaced."""

    def make(
        folder: str, files: dict[str, str], file: str = "", old: str = "", new: str = ""
    ) -> Path:
        for name, text in files.items():
            assert name != file or old in text
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if name == file else text)
        return tmp_path / folder

    return make


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("layers/moe.py", "other", "others", {}),  # which the adapter does not read
        ("layers/__init__.py", "Experts", "Router", {"engine.layers.Experts": "is gone"}),
        ("workers.py", "Worker", "Runner", {"engine.workers.Worker.warm_up": "is gone"}),
        ("layers/moe.py", "top_k", "k", {"top_k": "is gone from Experts"}),
        (
            "layers/base.py",
            "is_quantised",
            "quantised",
            {"is_quantised": "is gone from Experts, Layer"},
        ),
        ("layers/moe.py", "run(x, ids)", "run(x)", {"ids": "is gone from run()"}),
    ],
)
def test_what_moved_is_named(
    write: Callable[..., Path], file: str, old: str, new: str, said: dict[str, str]
) -> None:
    adapter = Adapter("engine", write("adapters", ADAPTER))
    verified = EngineSource(write("before", ENGINE))
    other = EngineSource(write("after", ENGINE, f"engine/{file}", old, new))
    assert moved(adapter, verified, verified) == {}
    assert moved(adapter, verified, other) == said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_installed_engine_has_what_its_adapter_imports_hooks_and_judges(engine: str) -> None:
    """Also what only another device, or another way of starting, imports."""
    spec = find_spec(engine)
    if spec is None or spec.origin is None:
        pytest.skip(f"{engine} is not installed here: make setup setup-sglang")
    adapter, source = Adapter(engine), EngineSource(Path(spec.origin).parents[1])
    assert {name for name in adapter.imported if not source.has(name)} == set()
    assert {name for name in adapter.spelled if not source.has(name)} <= {
        f"{engine}.ultraep_serve",  # a logger's name
        f"{engine}.general_plugins",  # a group of entry points
    }
    flags = {"vllm": "EngineArgs", "sglang": "Parallel"}[engine]
    assert "nnodes" in source.touched(adapter)[flags]
