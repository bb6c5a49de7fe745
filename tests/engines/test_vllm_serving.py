"""The real engine, as a user starts it: same tokens, every layer balanced, no hangs."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

from tests.support.serving_checks import (
    PROMPTS,
    balance,
    check_balanced,
    check_end,
    check_nothing_left,
    check_probes,
    check_without_files,
    run_paths,
    served,
)
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until
from ultraep_lab.bench.greedy_tokens import compare_tokens, generate
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under
from ultraep_serve.types import Policy

pytestmark = pytest.mark.engine


def serve(model: Path, directory: Path, mode: str, *extra: str) -> BalancedServer:
    return served("vllm", model, directory, mode, "float32", *extra)


class Served:
    """One compiled server in the way of ``mode``, which the last test ends."""

    mode: str

    @pytest.fixture(scope="class")
    @classmethod
    def server(
        cls, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[BalancedServer]:
        with serve(qwen3, tmp_path_factory.mktemp(cls.mode), cls.mode) as server:
            yield server

    def test_greedy_tokens_are_the_same_with_balancing(self, server: BalancedServer) -> None:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)


@pytest.mark.night
class TestTensorParallel(Served):
    mode = "tensor"

    def test_without_balancing_tokens_are_the_same_and_nothing_of_ours_is_left(
        self, server: BalancedServer, qwen3: Path, tmp_path: Path
    ) -> None:
        off = generate_under(server, Policy.OFF, PROMPTS)
        with serve(qwen3, tmp_path, "tensor", "--enforce-eager", "--policy", "off") as plain:
            alone = generate(plain.url, plain.model, PROMPTS, 16, concurrency=4)
            assert run_paths(plain) == []
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{plain.sidecar_url}/healthz")
        assert compare_tokens(off, alone).same == len(PROMPTS)

    def test_it_serves_on_without_its_files_and_says_so(self, server: BalancedServer) -> None:
        check_without_files(server)

    def test_it_ends_when_it_is_asked_to(self, server: BalancedServer) -> None:
        check_end(server)


class TestDataParallel(Served):
    mode = "data"

    def test_probes_are_answered_in_long_prefills(self, server: BalancedServer) -> None:
        check_probes(server, "vllm")

    def test_a_killed_server_takes_everything_down_and_leaves_nothing(
        self, server: BalancedServer
    ) -> None:
        workers = [rank["pid"] for rank in balance(server)["ranks"]]
        subprocess.run(["kill", "-KILL", str(server.process_id)], check=True)
        assert server.wait(5.0) == -signal.SIGKILL
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 180.0)
        check_nothing_left(server)


@pytest.mark.night
def test_pipeline_stages_balance_apart_and_are_shown_together(qwen3: Path, tmp_path: Path) -> None:
    with serve(qwen3, tmp_path, "tensor", "--pipeline-parallel-size", "2") as server:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)
        found = balance(server)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
        assert all(rank["bytes_received"] > 0 for rank in found["ranks"][::2])
