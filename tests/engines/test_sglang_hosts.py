"""SGLang on two hosts: two launchers on this machine, each with ranks and a sidecar of its own."""

from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

from tests.support.serving_checks import CONTEXT, check_two_hosts, two_hosts
from tests.support.tiny_models import tiny_qwen3
from ultraep_serve.demo.balanced_server import expert_parallel_flags
from ultraep_serve.machine import free_port

pytestmark = pytest.mark.engine


def test_two_nodes_serve_the_same_tokens_and_balance_in_their_domains(
    qwen3_four_ranks: Path, tmp_path: Path
) -> None:
    shared = [
        *expert_parallel_flags("tensor", "float32", CONTEXT, "sglang")[4:],
        *("--tp-size", "4", "--ep-size", "4", "--nnodes", "2"),
        *("--dist-init-addr", f"127.0.0.1:{free_port()}"),
    ]
    first_flags, second_flags = [*shared, "--node-rank", "0"], ["--node-rank", "1"]
    with two_hosts("sglang", qwen3_four_ranks, tmp_path, first_flags, second_flags) as (
        first,
        second,
    ):
        check_two_hosts(first, second, tiny_qwen3().num_layers)
