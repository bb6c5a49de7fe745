"""The real engine, as a user starts it: same tokens, every layer balanced, no hangs."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup")

from tests.support.serving_checks import (
    CONTEXT,
    PROMPTS,
    balance,
    check_balanced,
    run_paths,
    served,
)
from tests.support.tiny_models import tiny_glm4, tiny_qwen3
from tests.support.waiting import until
from ultraep_lab.bench.greedy_tokens import compare_tokens, generate
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.comparators import policy_function
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under
from ultraep_lab.demo.models import make_model
from ultraep_lab.replay import replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import load_trace
from ultraep_lab.trace import LoadTrace
from ultraep_serve.types import Policy

pytestmark = pytest.mark.engine


def serve(model: Path, directory: Path, mode: str, *extra: str) -> BalancedServer:
    return served("vllm", model, directory, mode, "float32", *extra)


class TestTensorParallel:
    """One compiled server; the last test kills one of its ranks."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(
        cls, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[BalancedServer]:
        with serve(qwen3, tmp_path_factory.mktemp("tensor"), "tensor") as server:
            yield server

    def test_greedy_tokens_are_the_same_with_balancing(self, server: BalancedServer) -> None:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)

    @pytest.mark.night
    def test_without_balancing_tokens_are_the_same_and_nothing_of_ours_is_left(
        self, server: BalancedServer, qwen3: Path, tmp_path: Path
    ) -> None:
        off = generate_under(server, Policy.OFF, PROMPTS)
        with serve(qwen3, tmp_path, "tensor", "--enforce-eager", "--policy", "off") as plain:
            alone = generate(plain.url, plain.model, PROMPTS, 16, concurrency=4)
            assert run_paths(plain) == []
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{plain.sidecar_url}/healthz")
        assert compare_tokens(off, alone).identical == len(PROMPTS)

    def test_killed_rank_ends_the_server_and_leaves_nothing(self, server: BalancedServer) -> None:
        assert httpx.get(f"{server.sidecar_url}/readyz").status_code == 200
        victim = balance(server)["ranks"][1]["pid"]
        subprocess.run(["kill", "-KILL", str(victim)], check=True)
        wait_until_not_ready(server)
        server.wait(180.0)  # vLLM's status is 0 where its engine died after the start
        until(lambda: not run_paths(server), 30.0)


class TestDataParallel:
    """One compiled server; the last test kills its first process."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(
        cls, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[BalancedServer]:
        with serve(qwen3, tmp_path_factory.mktemp("data"), "data") as server:
            yield server

    def test_greedy_tokens_are_the_same_with_balancing(self, server: BalancedServer) -> None:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)

    def test_a_recorded_trace_shows_the_imbalance_that_was_served(
        self, server: BalancedServer, tmp_path: Path
    ) -> None:
        """``ultraep-serve record`` records the loads, of ranks with tokens of their own."""
        with closing(Sidecar(server.sidecar_url, server.token)) as sidecar:
            sidecar.set_policy(Policy.QUOTA)
            since_ns = time.time_ns()
            trace = record_one_prompt(server, tmp_path / "quota.npz")
            served = sidecar.balance(since_ns, Policy.QUOTA)["imbalance"]["before"]
        spec = tiny_qwen3()
        assert (trace.num_batches, trace.num_layers) == (4, spec.num_layers)
        assert trace.num_experts == spec.num_experts
        assert trace.metadata["missed_records"] == 0
        replayed = replay(trace, ReplayOptions(num_ranks=2), [policy_function("off")])
        assert np.mean(replayed.imbalance_before) == pytest.approx(served["mean"], rel=1e-2)

    def test_a_killed_server_takes_everything_down_and_leaves_nothing(
        self, server: BalancedServer
    ) -> None:
        workers = [rank["pid"] for rank in balance(server)["ranks"]]
        subprocess.run(["kill", "-KILL", str(server.process_id)], check=True)
        assert server.wait(5.0) == -signal.SIGKILL
        until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), 180.0)
        until(lambda: not run_paths(server), 30.0)


@pytest.mark.night
def test_grouped_routing_and_slots_of_their_own_per_layer(glm4: Path, tmp_path: Path) -> None:
    extra = ["--enforce-eager", "--slots", "3", "--slot-memory", "per_layer"]
    with serve(glm4, tmp_path, "tensor", *extra) as server:
        check_balanced(server, num_layers=len(tiny_glm4().moe_layers))


@pytest.mark.night
def test_pipeline_stages_balance_apart_and_are_shown_together(qwen3: Path, tmp_path: Path) -> None:
    with serve(qwen3, tmp_path, "tensor", "--pipeline-parallel-size", "2") as server:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)
        found = balance(server)
        assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
        assert all(rank["bytes_received"] > 0 for rank in found["ranks"][::2])


def wait_until_not_ready(server: BalancedServer) -> None:
    """503 with a reason, or no sidecar any more because the server has ended already."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            reply = httpx.get(f"{server.sidecar_url}/readyz")
        except httpx.TransportError:
            return
        if reply.status_code == 503:
            assert reply.json()["reasons"]
            return
        time.sleep(0.05)
    pytest.fail("/readyz stays 200 after a rank was killed")


@pytest.mark.night
def test_layer_that_cannot_be_balanced_serves_plainly_on_request(tmp_path: Path) -> None:
    """Seven experts do not divide evenly over two ranks."""
    seven = make_model(tmp_path / "model", replace(tiny_qwen3(1.0, num_ranks=1), num_experts=7))
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--enforce-eager"]
    flags += ["--max-model-len", str(CONTEXT), "--on-unsupported", "off"]
    with BalancedServer(seven, flags, tmp_path / "log") as server:
        assert len(generate(server.url, server.model, PROMPTS[:4], 4, concurrency=4)) == 4
    assert "serving without balancing" in (tmp_path / "log").read_text()


def record_one_prompt(server: BalancedServer, out: Path) -> LoadTrace:
    """The loads of some prefills of the same prompt."""
    command = [sys.executable, "-m", "ultraep_serve.cli", "record", "--batches", "4"]
    command += ["--port", str(server.port), "--out", str(out)]
    with subprocess.Popen(command) as recorder:
        while recorder.poll() is None:
            generate(server.url, server.model, [max(PROMPTS, key=len)], 1, concurrency=1)
            time.sleep(0.3)  # or the server would leave the recorder no core to start on
    assert recorder.returncode == 0
    trace = load_trace(out)
    assert isinstance(trace, LoadTrace)
    return trace
