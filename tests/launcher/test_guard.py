"""Asked to balance, but an engine's filter leaves the plugin out."""

import sys
from types import ModuleType

import pytest

from ultraep_serve.launcher import guard

ASKED = ["python", "-m", "server", "--additional-config", '{"ultraep": {}}', "--port", "1"]


@pytest.fixture(autouse=True)
def _an_engine_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("vllm", "sglang"):
        monkeypatch.delitem(sys.modules, engine, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS", "ULTRAEP_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "server"])


@pytest.mark.parametrize("named", ["", "another_one", "other,ultraep", "other, ultraep_serve"])
@pytest.mark.parametrize("by", ["command line", "dotted", "environment"])
def test_a_filter_that_leaves_the_plugin_out_stops_the_process(
    monkeypatch: pytest.MonkeyPatch, named: str, by: str
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", named)
    guard.check()
    if by == "environment":
        monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    elif by == "dotted":
        monkeypatch.setattr(sys, "orig_argv", ["s", "--additional_config.ultraep.slots", "3"])
    else:
        monkeypatch.setattr(sys, "orig_argv", ASKED)
    with pytest.raises(SystemExit, match=f"VLLM_PLUGINS = '{named}' leaves ultraep_serve out; add"):
        guard.check()


@pytest.mark.parametrize("named", [None, "ultraep_serve", "another_one,ultraep_serve"])
def test_others_do_not(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    monkeypatch.setattr(sys, "orig_argv", ASKED)
    monkeypatch.setenv("SGLANG_PLUGINS", "another_one")  # of an engine that is not here
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    guard.check()


def test_a_program_that_imports_torch_before_its_engine_is_warned(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("ULTRAEP_CONFIG", "{}")
    monkeypatch.setenv("SGLANG_PLUGINS", "another_one")
    guard.check()
    assert not recwarn  # vLLM is what is here
    monkeypatch.delitem(sys.modules, "vllm")
    with pytest.warns(UserWarning, match="sglang would not balance here: SGLANG_PLUGINS"):
        guard.check()


def test_an_empty_filter_is_none_for_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "")
    assert guard.left_out("sglang") is None
    monkeypatch.setenv("SGLANG_PLUGINS", "another_one")
    assert "SGLANG_PLUGINS" in (guard.left_out("sglang") or "")


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["--additional-config", '{"ultraep": {"slots": 1}}'], {"slots": 1}),
        (['--additional_config={"ultraep": {}}', "--port", "1"], {}),
        (["--additional-config", '{"others": {}}'], None),
        (["--additional-config", "[]"], None),
        (["--additional-config", "{"], None),
        (["--model", "m"], None),
        (["--additional-config"], None),  # another program's own
    ],
)
def test_the_command_lines_setting(arguments: list[str], setting: object) -> None:
    assert guard.setting_on_command_line(arguments) == setting
