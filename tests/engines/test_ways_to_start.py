"""Engines started without the launcher: switched on by a setting, balanced, tidy at their end."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving_checks import check_balanced, check_killed_rank
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until
from tests.support.ways_to_start import CONTEXT, ENVIRONMENT, SETTINGS, UnmodifiedServer
from ultraep_serve.telemetry.run_directory import remove_abandoned

pytestmark = pytest.mark.engine

PROGRAMS = {
    "ray_serve": "vllm",
    "ray_workers": "vllm",
    "sglang_engine": "sglang",
}
VLLM_FLAGS = ["--enable-expert-parallel", "--no-enable-prefix-caching", "--enforce-eager",
              "--dtype", "float32", "--max-model-len", str(CONTEXT)]  # fmt: skip
SGLANG_FLAGS = ["--tp-size", "2", "--ep-size", "2", "--device", "cpu", "--disable-radix-cache",
                "--attention-backend", "torch_native", "--dtype", "float32",
                "--context-length", str(CONTEXT),
                "--max-total-tokens", str(2 * CONTEXT)]  # fmt: skip


def need(engine: str) -> None:
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}: make setup, make setup-sglang")


def environment(engine: str, **settings: Any) -> dict[str, str]:
    """vLLM has a setting of its own, SGLang takes the variable."""
    made = {**os.environ, **ENVIRONMENT}
    if engine == "sglang":
        made["ULTRAEP_CONFIG"] = json.dumps({**SETTINGS, **settings})
    return made


def is_removed(run_path: Path) -> bool:
    """By the next start at the latest: Ray kills its actors, and SGLang its ranks."""
    remove_abandoned()
    return not run_path.exists()


@pytest.mark.night
@pytest.mark.parametrize("way", PROGRAMS)
def test_a_program_of_ones_own(way: str, qwen3: Path, tmp_path: Path) -> None:
    check_program(way, PROGRAMS[way], qwen3, tmp_path)


def check_program(way: str, engine: str, model: Path, tmp_path: Path) -> None:
    need(engine)
    if way.startswith("ray"):
        pytest.importorskip("ray", reason="not in SGLang's environment")
    out, log = tmp_path / "out.json", tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.ways_to_start", way, str(model), str(out)]
    with log.open("wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, timeout=400, env=environment(engine)
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    found = json.loads(out.read_text())
    if engine == "vllm" and not way.startswith("ray"):
        until(lambda: not Path(found["run_dir"]).exists(), 30.0)
    until(lambda: is_removed(Path(found["run_dir"])))
    if way == "ray_workers":
        assert found["states"] == ["READY", "READY"]
        return
    assert found["on"] == found["off"]
    assert list(found["layers"]) == [str(layer) for layer in range(tiny_qwen3().num_layers)]
    for before, after in found["layers"].values():
        assert before > 1.2
        assert after <= 1.02
    if "refused" in found:
        assert all("serves on with those it has" in refusal for refusal in found["refused"])
        assert found["rows"] == [[tiny_qwen3().num_experts // 2] * tiny_qwen3().num_layers] * 2
    if "drafts" in found:
        drafted, accepted = found["drafts"]
        assert drafted > 0
        assert accepted / drafted > 0.95


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[UnmodifiedServer]:
    """The engine's own server, with the sidecar as one of its settings."""
    engine = "vllm" if find_spec("vllm") else "sglang"
    need(engine)
    flags = SGLANG_FLAGS if engine == "sglang" else ["--tensor-parallel-size", "2", *VLLM_FLAGS]
    log = tmp_path_factory.mktemp("server") / "log"
    with UnmodifiedServer(qwen3, flags, log, engine, environment) as started:
        yield started


class TestServer:
    """One server of the engine that is here; the last test kills one of its ranks."""

    def test_it_is_balanced_and_gives_the_same_tokens(self, server: UnmodifiedServer) -> None:
        check_balanced(server, num_layers=tiny_qwen3().num_layers)

    @pytest.mark.night
    def test_another_run_beside_it_does_not_mix(
        self, server: UnmodifiedServer, qwen3: Path, tmp_path: Path
    ) -> None:
        if find_spec("vllm") is None:
            pytest.skip("shown with vLLM")
        check_program("llm", "vllm", qwen3, tmp_path)
        check_balanced(server, num_layers=tiny_qwen3().num_layers)

    def test_a_killed_rank_ends_it_and_leaves_nothing(self, server: UnmodifiedServer) -> None:
        check_killed_rank(server)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        pytest.param({}, "there is nothing to balance on one rank; add --enable-expert-parallel",
                     marks=pytest.mark.night),  # when the model is loaded
        ({"slots": "two"}, "slots = 'two' must be a whole number"),
    ],
)  # fmt: skip
def test_vllm_refuses_and_says_the_reason_last(
    qwen3: Path, setting: dict[str, Any], reason: str
) -> None:
    need("vllm")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(qwen3)]
    command += [*VLLM_FLAGS[1:], "--port", "0"]
    command += ["--additional-config", json.dumps({"ultraep": setting})]
    alone = {**environment("vllm"), "VLLM_CPU_OMP_THREADS_BIND": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=alone)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "resource_tracker" not in line]
    lines = [line for line in lines if not line.startswith("  warnings.warn(")]
    assert lines[-1].startswith(f"ultraep: error: {reason}"), done.stderr[-2000:]
