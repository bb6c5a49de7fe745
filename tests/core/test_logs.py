"""Lines of launcher and ranks, as text and as JSON objects."""

import json
import subprocess
import sys
from typing import Any

import pytest

RANK = """
import logging, sys
from ultraep_serve.system.logs import say, set_up_logs
write = sys.stderr.write
sys.stderr.write = lambda text: write("(Worker_TP0 pid=7) " + text)  # as vLLM has it
logging.basicConfig()
set_up_logs("json")
set_up_logs("json")  # settings are seen more than once
logging.getLogger("vllm.ultraep_serve").info("ultraep: balancing %d layers", 4)
logging.getLogger("ultraep_serve.balance.watch").warning("late", extra={"fields": {"rank": 1}})
say("rank 0 ends: \\n", is_error=True)
logging.getLogger("vllm").warning("the engine's own")
"""


def errors_of(*words: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


def test_ranks_write_json_past_what_engines_put_in_front() -> None:
    _, lines = errors_of("-c", RANK)
    *ours, other = lines
    assert other == "(Worker_TP0 pid=7) WARNING:vllm:the engine's own"
    found: list[dict[str, Any]] = [json.loads(line) for line in ours]
    assert [(line["level"], line["message"]) for line in found] == [
        ("info", "balancing 4 layers"),
        ("warning", "late"),
        ("error", "rank 0 ends: \n"),
    ]
    assert found[1]["rank"] == 1
    assert len({line["process"] for line in found}) == 1


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_refusal_of_the_launcher_is_one_line(log_format: str) -> None:
    words = ["-m", "ultraep_serve.cli", "vllm", "M", "--log-format", log_format]
    code, (line,) = errors_of(*words, "--sidecar-port", "70000")
    assert code == 2
    assert line.startswith("ultraep-serve: error:")  # of flags, before a format is known
    code, (line,) = errors_of(*words)
    assert code == 2
    if log_format == "json":
        found = json.loads(line)
        assert found["level"] == "error"
        line = found["message"]
    assert "vLLM" in line or "one rank" in line  # it is not installed with SGLang
