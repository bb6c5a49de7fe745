"""Engines' own parsers, each imported once for many command lines; of both engines' environments.

    python -m tests.support.engine_flags ENGINE

answers each line of its input, the words of a command line as JSON, with what the module that reads
flags would: exit code, output and errors.
"""

import contextlib
import functools
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def run_reader(module: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """In the place of ``launcher.engine.run_reader``; skips a test whose engine is not there."""
    reader = _reader(module[0].split(".")[2])
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(json.dumps(list(module[1:])) + "\n")
    reader.stdin.flush()
    return subprocess.CompletedProcess(list(module), *json.loads(reader.stdout.readline()))


@functools.cache
def _reader(engine: str) -> "subprocess.Popen[str]":
    python = sys.executable
    if find_spec(engine) is None:  # it has an environment of its own, beside this one
        other = sys.prefix.removesuffix("-sglang") if engine == "vllm" else f"{sys.prefix}-sglang"
        python = str(Path(other) / "bin" / "python")
        if not Path(python).exists():
            pytest.skip(f"needs {engine}: make setup setup-sglang")
    command = [python, "-m", __name__, engine]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)


def _answer(module: Any, words: list[str]) -> tuple[int, str, str]:
    out, errors, code = io.StringIO(), io.StringIO(), 0
    sys.argv[1:] = words
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            module.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Exception as error:
            code = 1
            errors.write(str(error))
    return code, out.getvalue(), errors.getvalue()


if __name__ == "__main__":
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        reading = import_module(f"ultraep_serve.engines.{sys.argv[1]}.flags")
    for line in sys.stdin:
        answers.write(json.dumps(_answer(reading, json.loads(line))) + "\n")
        answers.flush()
