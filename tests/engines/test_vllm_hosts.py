"""vLLM on two hosts: two launchers on this machine, each with ranks and a sidecar of its own."""

import subprocess
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

from tests.support.serving_checks import CONTEXT, PROMPTS, balance, check_two_hosts, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_serve.demo.balanced_server import expert_parallel_flags, generate_under
from ultraep_serve.errors import BenchError
from ultraep_serve.machine import free_port
from ultraep_serve.ring.run_directory import run_directory_of_port
from ultraep_serve.types import Policy

pytestmark = pytest.mark.engine


def data_parallel(ranks_each: int) -> tuple[list[str], list[str]]:
    """Flags of both hosts, and those of the second alone, which only has ranks."""
    shared = [
        *expert_parallel_flags("data", "float32", CONTEXT)[2:],
        *("--data-parallel-size", str(2 * ranks_each)),
        *("--data-parallel-size-local", str(ranks_each)),
        *("--data-parallel-address", "127.0.0.1"),
        *("--data-parallel-rpc-port", str(free_port())),
        "--enforce-eager",
    ]
    return shared, ["--headless", "--data-parallel-start-rank", str(ranks_each)]


def test_two_hosts_serve_the_same_tokens_and_balance_in_their_domains(
    qwen3_four_ranks: Path, tmp_path: Path
) -> None:
    """Data parallel and eager; at the end a rank of the second host is killed, which ends both."""
    with two_hosts("vllm", qwen3_four_ranks, tmp_path, *data_parallel(2)) as (first, second):
        check_two_hosts(first, second, tiny_qwen3().num_layers)
        victim = balance(second)["ranks"][0]["pid"]
        subprocess.run(["kill", "-KILL", str(victim)], check=True)
        with pytest.raises((BenchError, httpx.HTTPError)):
            generate_under(first, Policy.QUOTA, PROMPTS)
        assert first.wait(180.0) != 0
        assert second.wait(180.0) != 0
    for server in (first, second):
        assert not run_directory_of_port(server.port).exists()
