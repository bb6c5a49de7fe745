"""The command that becomes the engine: its arguments, environment and settings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.engine_flags import run_reader
from ultraep_lab.this_machine import free_port
from ultraep_serve.cli import main, serve
from ultraep_serve.config import SIDECAR_DISTANCE, BalanceConfig
from ultraep_serve.system.environment import CONFIG_VARIABLE

TWO_RANKS = {
    "vllm": ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
    "sglang": ["--tp-size", "2", "--ep-size", "2", "--device", "cpu"],
}
Become = Callable[..., tuple[list[str], BalanceConfig]]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """What a command becomes: its arguments, and the settings that the engine gets."""
    for module in (serve, serve.sglang):
        monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(serve.engine, "run_reader", run_reader)
    monkeypatch.setenv(CONFIG_VARIABLE, '{"slots": 7}')  # which has no effect here

    def execute(_: str, *started: object) -> NoReturn:
        raise SystemExit(started)

    monkeypatch.setattr(os, "execve", execute)

    def become(engine: str, *flags: str) -> tuple[list[str], BalanceConfig]:
        with pytest.raises(SystemExit) as ended:
            main([engine, "m", *TWO_RANKS[engine], *flags])
        words, environment = ended.value.args[0]
        assert words[0] == sys.executable
        if engine == "sglang":
            return words, BalanceConfig.from_json(environment[CONFIG_VARIABLE])
        assert CONFIG_VARIABLE not in environment
        given = json.loads(words[-1])
        return words, BalanceConfig(**given["ultraep"])

    return become


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_it_becomes_the_engines_own_server_with_our_setting(engine: str, become: Become) -> None:
    port = free_port()
    seed = {"vllm": "--seed", "sglang": "--random-seed"}[engine]
    words, config = become(engine, "--port", str(port), "--slots", "3", seed, "5")
    program = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
    assert words[1:3] == ["-m", program[engine]]
    own = ["--model", "m", *TWO_RANKS[engine], "--port", str(port), seed, "5"]
    assert words[3 : 3 + len(own)] == own
    assert config.slots == 3
    assert config.sidecar is not None
    assert config.sidecar.port == port + SIDECAR_DISTANCE


def test_settings_of_others_stay(become: Become) -> None:
    given = ["--additional-config", '{"another": {"a": 1}}', "--seed", "5"]
    words, config = become("vllm", "--port", str(free_port()), *given)
    assert json.loads(words[-1])["another"] == {"a": 1}  # the last one counts
    assert config == BalanceConfig(sidecar=config.sidecar)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--additional-config", '{"ultraep": {}}'], "which are flags of this command"),
        (["--additional_config", "{"], "--additional-config is not a JSON object"),
        (["--additional-config.another.a", "1"], "write --additional-config '{...}'"),
    ],
)
def test_settings_that_cannot_be_joined_are_refused(
    given: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(serve.engine, "run_reader", run_reader)
    words = ["vllm", "m", *TWO_RANKS["vllm"], "--port", str(free_port()), *given]
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--no-sidecar"], ["--policy", "off"]])
def test_the_sidecar_can_be_left_out(flags: list[str], become: Become) -> None:
    assert become("vllm", "--port", str(free_port()), *flags)[1].sidecar is None


def test_a_wrong_file_of_settings_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text("slotz: 3")
    for command in (["vllm", "m"], ["sglang", "m"], ["sidecar", "--run-dir", str(tmp_path)]):
        assert main([*command, "--ultraep-config", str(tmp_path / "wrong.yaml")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "unknown setting 'slotz'" in line
        assert "wrong.yaml" in line


BECOMES = """
import argparse, os, sys
from ultraep_serve.cli import main, serve
from ultraep_serve.launcher.engine import EngineCommand
code = "import os; print(os.getpid(), os.environ['GIVEN'])"
parsed = argparse.Namespace(model="m", port=8000)
serve.engine.read_flags = lambda *_: parsed
serve.find_spec = lambda name: name
serve.vllm.engine_command = lambda *_: EngineCommand(
    [sys.executable, "-c", code], {**os.environ, "GIVEN": "x"}, None, ("cores 0-1",)
)
print(os.getpid(), flush=True)
main(["vllm", "m", "--policy", "off"])
"""


def test_it_is_the_same_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BECOMES], capture_output=True, text=True, check=True
    )
    before, after, given = done.stdout.split()
    assert (before, given) == (after, "x")
    assert done.stderr == "ultraep: cores 0-1\n"
