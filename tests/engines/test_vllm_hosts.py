"""vLLM on two hosts: two namespaces on this machine, each with a launcher, ranks and a sidecar."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

from tests.support.namespaces import Hosts, two_namespaces
from tests.support.serving_checks import CONTEXT, check_cut, check_two_hosts, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.balanced_server import expert_parallel_flags
from ultraep_serve.system.machine import free_port

pytestmark = pytest.mark.engine


def data_parallel(ranks_each: int, hosts: Hosts) -> tuple[list[str], list[str]]:
    """Flags of both hosts, and those of the second alone, which only has ranks."""
    shared = [
        *expert_parallel_flags("data", "float32", CONTEXT, prefix_cache=True)[2:],
        *("--data-parallel-size", str(2 * ranks_each)),
        *("--data-parallel-size-local", str(ranks_each)),
        *("--data-parallel-address", hosts.addresses[0]),
        *("--data-parallel-rpc-port", str(free_port())),
        "--enforce-eager",
    ]
    return shared, ["--headless", "--data-parallel-start-rank", str(ranks_each)]


def test_two_hosts_serve_the_same_tokens_and_balance_in_their_domains(
    qwen3_four_ranks: Path, tmp_path: Path
) -> None:
    """Data parallel and eager; at the end the link is cut, which ends both."""
    with (
        two_namespaces() as hosts,
        two_hosts("vllm", qwen3_four_ranks, tmp_path, hosts, *data_parallel(2, hosts)) as (
            first,
            second,
        ),
    ):
        check_two_hosts(first, second, tiny_qwen3().num_layers)
        check_cut(first, second)
