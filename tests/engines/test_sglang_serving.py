"""The real engine, as a user starts it: same tokens, every layer balanced, no hangs."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

pytest.importorskip("sglang", reason="needs SGLang: deploy/setup_sglang_cpu.py")

from tests.support.serving_checks import (
    PROMPTS,
    balance,
    check_balanced,
    check_end,
    check_probes,
    check_without_files,
    image_environment,
    run_paths,
    served,
)
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until
from ultraep_lab.bench.greedy_tokens import compare_tokens, generate
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, generate_under
from ultraep_lab.errors import ServerError
from ultraep_serve.types import Policy

pytestmark = pytest.mark.engine


def serve(model: Path, tmp_path: Path, *extra: str, dtype: str = "float32") -> BalancedServer:
    return served("sglang", model, tmp_path, "tensor", dtype, *extra)


def with_other_experts(model: Path, to: Path) -> Path:
    """A copy of a checkpoint whose experts give the negative of what they gave."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    for path in to.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if ".experts." in name and "down_proj" in name:
                tensors[name] = -tensors[name]
        save_file(tensors, path, {"format": "pt"})
    return to


def recorded_counts(server: BalancedServer, prompts: list[str], directory: Path) -> list[list[int]]:
    """What SGLang's own recorder counts for ``prompts``: assignments per layer and expert."""
    for file in directory.iterdir():
        file.unlink()
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        client.post("/start_expert_distribution_record").raise_for_status()
        generate(server.url, server.model, prompts, 1, concurrency=1)
        client.post("/stop_expert_distribution_record").raise_for_status()
        client.post("/dump_expert_distribution_record").raise_for_status()
    import torch

    dumps = [torch.load(path, weights_only=False) for path in directory.glob("*.pt")]
    assert dumps
    return dumps[0]["logical_count"].sum(dim=0).tolist()


@pytest.mark.night
class TestOneServer:
    """The last test ends it."""

    @pytest.fixture(scope="class")
    @classmethod
    def records(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Where SGLang's own recorder leaves its files."""
        return tmp_path_factory.mktemp("records")

    @pytest.fixture(scope="class")
    @classmethod
    def server(
        cls, qwen3: Path, records: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[BalancedServer]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(records))
            for name, value in image_environment("sglang").items():
                patch.setenv(name, value)
            extra = ("--expert-distribution-recorder-mode", "stat")
            with serve(qwen3, tmp_path_factory.mktemp("server"), *extra) as server:
                yield server

    def test_greedy_tokens_are_the_same_with_balancing(self, server: BalancedServer) -> None:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)
        assert balance(server)["engine"] == "sglang"

    def test_the_engines_own_counts_are_the_same_with_balancing(
        self, server: BalancedServer, records: Path
    ) -> None:
        with closing(Sidecar(server.sidecar_url, server.token)) as sidecar:
            sidecar.set_policy(Policy.OFF)
            off = recorded_counts(server, PROMPTS[:4], records)
            sidecar.set_policy(Policy.QUOTA)
            assert recorded_counts(server, PROMPTS[:4], records) == off

    def test_new_weights_reach_the_copies_that_have_stayed(
        self, server: BalancedServer, qwen3: Path, tmp_path: Path
    ) -> None:
        assert balance(server)["replicas"]["new"] < balance(server)["replicas"]["mean"]
        before = generate_under(server, Policy.QUOTA, PROMPTS)
        other = with_other_experts(qwen3, tmp_path / "other")
        for path in (other, qwen3):
            route, wanted = f"{server.url}/update_weights_from_disk", {"model_path": str(path)}
            answer = httpx.post(route, json=wanted, timeout=60.0)
            assert answer.json()["success"], answer.text
            on = generate_under(server, Policy.QUOTA, PROMPTS)
            off = generate_under(server, Policy.OFF, PROMPTS)
            assert compare_tokens(off, on).same == len(PROMPTS)
            assert (compare_tokens(before, on).same == len(PROMPTS)) == (path == qwen3)

    def test_probes_are_answered_in_long_prefills(self, server: BalancedServer) -> None:
        check_probes(server, "sglang")

    def test_it_serves_on_without_its_files_and_says_so(self, server: BalancedServer) -> None:
        check_without_files(server)

    def test_it_ends_when_it_is_asked_to(self, server: BalancedServer) -> None:
        check_end(server)


@pytest.mark.night
def test_bfloat16_tokens_and_chunked_mixed_prefill(qwen3: Path, tmp_path: Path) -> None:
    """Sums complete in float32, so that the chunks' ranks do not matter in bfloat16 either."""
    extra = ("--chunked-prefill-size", "512", "--enable-mixed-chunk", "--slot-memory", "per_layer")
    with serve(qwen3, tmp_path, *extra, dtype="bfloat16") as server:
        long = [prompt for prompt in PROMPTS if len(prompt) > 2000]
        off = generate_under(server, Policy.OFF, long, concurrency=1)
        on = generate_under(server, Policy.QUOTA, long, concurrency=1)
        assert compare_tokens(off, on).same == len(long)
        generate_under(server, Policy.QUOTA, PROMPTS)  # decode rides along with prefill
        summary = balance(server)
        assert summary["batches"]["planned"] > len(long)
        assert summary["batches"]["skipped"]["inconsistent"] == 0


@pytest.mark.night
def test_policy_off_serves_and_leaves_nothing_of_ours(qwen3: Path, tmp_path: Path) -> None:
    with serve(qwen3, tmp_path, "--policy", "off") as server:
        assert len(generate(server.url, server.model, PROMPTS, 4, concurrency=4)) == len(PROMPTS)
        assert run_paths(server) == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.sidecar_url}/healthz")


UNSUPPORTED = ("--ep-num-redundant-experts", "2")


def test_what_cannot_be_balanced_stops_the_server(qwen3: Path, tmp_path: Path) -> None:
    server = serve(qwen3, tmp_path, *UNSUPPORTED)
    with pytest.raises(ServerError), server:
        pass
    assert "--ep-num-redundant-experts are EPLB's copies" in server.log_path.read_text()
    until(lambda: not run_paths(server), 30.0)


@pytest.mark.night
def test_what_cannot_be_balanced_serves_plainly_on_request(qwen3: Path, tmp_path: Path) -> None:
    with serve(qwen3, tmp_path, *UNSUPPORTED, "--on-unsupported", "off") as server:
        assert len(generate(server.url, server.model, PROMPTS[:4], 4, concurrency=4)) == 4
    assert "serving without balancing" in server.log_path.read_text()
