"""An engine on two hosts: namespaces on this machine, each with a launcher, ranks and a sidecar."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.namespaces import Hosts, two_namespaces
from tests.support.serving_checks import CONTEXT, check_cut, check_two_hosts, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.balanced_server import expert_parallel_flags
from ultraep_lab.this_machine import free_port

pytestmark = [pytest.mark.engine, pytest.mark.night]


def flags_of(engine: str, hosts: Hosts) -> tuple[list[str], list[str]]:
    """Of both hosts, with two ranks each, and of the second alone, which only has ranks."""
    address, port = hosts.addresses[0], str(free_port())
    if engine == "sglang":
        shared = [
            *expert_parallel_flags("tensor", "float32", CONTEXT, engine, True)[4:],
            *("--tp-size", "4", "--ep-size", "4", "--nnodes", "2"),
            *("--dist-init-addr", f"{address}:{port}", "--node-rank", "0"),
        ]
        return shared, ["--node-rank", "1"]
    shared = [
        *expert_parallel_flags("data", "float32", CONTEXT, prefix_cache=True)[2:],
        *("--data-parallel-size", "4", "--data-parallel-size-local", "2", "--enforce-eager"),
        *("--data-parallel-address", address, "--data-parallel-rpc-port", port),
    ]
    return shared, ["--headless", "--data-parallel-start-rank", "2"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_two_hosts_serve_the_same_tokens_and_balance_in_their_domains(
    engine: str, qwen3_four_ranks: Path, tmp_path: Path
) -> None:
    """At the end the link between them is cut, which ends both."""
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}: make setup, make setup-sglang")
    with (
        two_namespaces() as hosts,
        two_hosts(engine, qwen3_four_ranks, tmp_path, hosts, *flags_of(engine, hosts)) as servers,
    ):
        check_two_hosts(*servers, tiny_qwen3().num_layers)
        check_cut(*servers)
