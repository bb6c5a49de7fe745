"""Command lines of pods, as the kubelet and the shell make them, and the flags in them."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from files import ROOT
from manifests import OURS, Pod

from tests.support.engine_flags import run_reader
from ultraep_serve.cli import serve
from ultraep_serve.launcher import engine as launcher
from ultraep_serve.launcher import sglang, vllm

NUM_HOSTS = "2"
ENGINES: dict[str, Any] = {"vllm": vllm, "sglang": sglang}
INTERPRETERS = {
    "vllm": Path(sys.executable),
    "sglang": ROOT / ".venv-sglang" / "bin" / "python",
}


def words(pod: Pod, host: int) -> list[str]:
    """The command line of the first container of ``pod`` on the ``host``-th of its group.

    Without the program's name, where that comes from the image or is ``ultraep-serve``.
    """
    container = pod.spec["containers"][0]
    place = {
        "LWS_LEADER_ADDRESS": f"{OURS}-0.{OURS}.default",
        "LWS_GROUP_SIZE": NUM_HOSTS,
        "LWS_WORKER_INDEX": str(host),
    }
    command = [_filled_in(word, place) for word in container.get("command", [])]
    arguments = [_filled_in(word, place) for word in container["args"]]
    if command[:2] == ["sh", "-c"]:
        script = command[2].replace("exec ultraep-serve", "printf '%s\\n'")
        assert script != command[2]
        shell = ["sh", "-uc", script, *command[3:], *arguments]
        done = subprocess.run(
            shell, env={**os.environ, **place}, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()
    return [*command, *arguments]


def _filled_in(word: str, place: dict[str, str]) -> str:
    """``word`` with the kubelet's references to variables replaced."""
    for name, value in place.items():
        word = word.replace(f"$({name})", value)
    return word


def our_flags(line: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What `ultraep-serve` itself takes of ``line``, and what it passes on to the engine."""
    parser = argparse.ArgumentParser()
    engines = parser.add_subparsers()
    for engine in serve.LAUNCHERS:
        serve.add_arguments(engines.add_parser(engine))
    return parser.parse_known_args(line)


def read_flags(engine: str, flags: list[str]) -> argparse.Namespace:
    """What ``engine`` makes of ``flags``, of which the model may be the first."""
    words = flags if flags[0].startswith("-") else ["--model", *flags]
    with patch.object(launcher, "run_reader", run_reader):
        return launcher.read_flags(engine, words)


def named(line: list[str]) -> dict[str, str]:
    """Flags of ``line`` by name, those written ``--name=value`` or alone."""
    pairs = (word[2:].partition("=") for word in line if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def check_parallelism(engine: str, flags: argparse.Namespace) -> None:
    """Fails where nothing could be balanced."""
    if engine == "vllm":
        num_ranks = flags.tensor_parallel_size * flags.data_parallel_size
        assert vllm.wrong_ranks(num_ranks, flags.enable_expert_parallel) is None
    else:
        assert sglang.wrong_sizes(flags) is None


def accepts(
    engine: str, lines: list[list[str]], parser: str = ""
) -> "subprocess.CompletedProcess[str]":
    """The engine's own parser on ``lines``, or another ``parser`` of accepts.py in its place."""
    script = Path(__file__).with_name("accepts.py")
    return subprocess.run(
        [INTERPRETERS[engine], script, parser or engine],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=False,
    )
