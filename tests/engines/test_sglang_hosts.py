"""SGLang on two hosts: namespaces on this machine, each with a launcher, ranks and a sidecar."""

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

from tests.support.namespaces import two_namespaces
from tests.support.serving_checks import CONTEXT, check_cut, check_two_hosts, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.balanced_server import expert_parallel_flags
from ultraep_serve.system.machine import free_port

pytestmark = pytest.mark.engine


def test_two_nodes_serve_the_same_tokens_and_balance_in_their_domains(
    qwen3_four_ranks: Path, tmp_path: Path
) -> None:
    """At the end the link between them is cut, which ends both."""
    with two_namespaces() as hosts:
        shared = [
            *expert_parallel_flags("tensor", "float32", CONTEXT, "sglang", True)[4:],
            *("--tp-size", "4", "--ep-size", "4", "--nnodes", "2"),
            *("--dist-init-addr", f"{hosts.addresses[0]}:{free_port()}"),
        ]
        flags = [*shared, "--node-rank", "0"], ["--node-rank", "1"]
        with two_hosts("sglang", qwen3_four_ranks, tmp_path, hosts, *flags) as (first, second):
            check_two_hosts(first, second, tiny_qwen3().num_layers)
            check_cut(first, second)
