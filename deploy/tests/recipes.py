"""The page of recipes: its fenced blocks, and the engines that its commands start."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import yaml
from files import ROOT

PAGE = ROOT / "docs" / "recipes.md"
_MODULES = {
    "vllm.entrypoints.openai.api_server": ("vllm", "vllm"),
    "dynamo.vllm": ("vllm", "vllm-engine"),
    "sglang.launch_server": ("sglang", "sglang"),
}


@dataclass(frozen=True)
class Command:
    """One command of a shell block."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)  # before it, or exported above it


@dataclass(frozen=True)
class Start:
    """An engine that a recipe starts."""

    engine: str
    parser: str  # the one of accepts.py that reads its flags
    flags: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()  # published by its container; empty where there is none


def blocks(language: str) -> list[str]:
    """All fenced blocks of ``language``."""
    fenced = rf"^```{language}\n(.*?)^```$"
    return re.findall(fenced, PAGE.read_text(), re.MULTILINE | re.DOTALL)


def commands() -> list[Command]:
    """All commands of shell blocks."""
    found = []
    for block in blocks("sh"):
        exported: dict[str, str] = {}
        for line in block.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["export"]:
                exported |= dict(word.split("=", 1) for word in words[1:])
                continue
            own = {}
            while words and re.match(r"[A-Z_]+=", words[0]):
                own |= dict([words.pop(0).split("=", 1)])
            if words:
                found.append(Command(words, exported | own))
    return found


def starts() -> list[Start]:
    """All engines that the page starts: from a shell, from values of a chart, from programs."""
    found = [start for command in commands() if (start := _start(command)) is not None]
    return [*found, _of_chart(), *(start for code in blocks("python") for start in _of(code))]


def _start(command: Command, ports: tuple[str, ...] = ()) -> Start | None:
    words = command.words[1:] if command.words[0] == "exec" else command.words
    if words[:2] == ["vllm", "serve"]:
        return Start("vllm", "vllm", words[2:], command.variables, ports)
    if words[1:2] == ["-m"] and words[2] in _MODULES:
        return Start(*_MODULES[words[2]], words[3:], command.variables, ports)
    if words[:2] == ["docker", "run"]:
        return _in_container(words[2:])
    if words[0] == "lm_eval":
        return _of_harness(command)
    return None


def _in_container(words: list[str]) -> Start | None:
    parser = argparse.ArgumentParser()
    for flag in ("--gpus", "--shm-size"):
        parser.add_argument(flag, required=True)
    for flag in ("-p", "-e"):
        parser.add_argument(flag, action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(words)
    entrypoint = ["vllm", "serve"] if given.image.startswith("vllm-") else []
    variables = dict(variable.split("=", 1) for variable in given.e)
    return _start(Command([*entrypoint, *given.command], variables), tuple(given.p))


def _of_harness(command: Command) -> Start:
    """What lm_eval does not know, it passes to ``LLM``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_args")
    given = parser.parse_known_args(command.words)[0].model_args
    arguments = {
        name: value == "True" or value
        for name, value in (pair.split("=") for pair in given.split(","))
    }
    arguments["model"] = arguments.pop("pretrained")
    return Start("vllm", "vllm-engine", as_flags(arguments), command.variables)


def values() -> dict[str, Any]:
    """The values for the chart of vLLM's production stack."""
    (text,) = (block for block in blocks("yaml") if block.startswith("# values.yaml"))
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def _of_chart() -> Start:
    """What the chart makes of the values."""
    (model,) = values()["servingEngineSpec"]["modelSpec"]
    config = model["vllmConfig"]
    size = f"--tensor-parallel-size={config['tensorParallelSize']}"
    line = [model["modelURL"], "--host=0.0.0.0", "--port=8000", "--no-enable-prefix-caching", size]
    return Start("vllm", "vllm", [*line, *config["extraArgs"]])


def _of(code: str) -> list[Start]:
    """The engines of a program, which runs with stand-ins for them."""
    engines = {name: MagicMock(spec=ModuleType) for name in ("vllm", "sglang")}
    engines["vllm"].LLM, engines["vllm"].SamplingParams = MagicMock(), MagicMock()
    engines["sglang"].Engine = MagicMock()
    with patch.dict(sys.modules, engines), patch("builtins.print"):
        exec(compile(code, PAGE.name, "exec"), {"__name__": "__main__"})
    found = []
    for call in engines["vllm"].LLM.call_args_list:
        (model,) = call.args
        found.append(Start("vllm", "vllm-engine", as_flags({"model": model, **call.kwargs})))
    for call in engines["sglang"].Engine.call_args_list:
        variables = {"ULTRAEP_CONFIG": "{}"}  # as the page says
        found.append(Start("sglang", "sglang", as_flags(call.kwargs), variables))
    return found


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of an engine in Python, as the flags of the same names."""
    flags = []
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        flags.append(flag if value is True else f"{flag}={text}")
    return flags
