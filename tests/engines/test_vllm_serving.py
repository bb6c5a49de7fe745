"""The real engine, as a user starts it: same tokens, every layer balanced, no hangs."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
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
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.comparators import policy_function
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under
from ultraep_lab.replay import replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import load_trace
from ultraep_lab.trace import LoadTrace
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
