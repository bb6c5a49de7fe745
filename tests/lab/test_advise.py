"""`ultraep-serve advise` end to end, on synthetic traces and a stand-in for a server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_lab.store import save_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_serve.cli import execute
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError, UltraEPError

CONFIG = {
    "hidden_size": 2048, "moe_intermediate_size": 1024, "num_hidden_layers": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 4096,
}  # fmt: skip
PNG = b"\x89PNG\r\n\x1a\n"
PICTURES = {"imbalance.png", "gain-by-slots.png", "break-even.png"}


def run(*words: str | Path) -> int:
    return execute(["advise", *map(str, words)])


def save_loads(path: Path, weights: np.ndarray, tokens: int, batches: int = 4) -> Path:
    """``batches`` of 2 layers on 4 ranks, top-2 of ``weights`` (E,)."""
    rng = np.random.default_rng(0)
    weights = weights / weights.sum()
    loads = rng.multinomial(tokens * 2 // 4, weights, size=(batches, 2, 4))
    save_trace(path, LoadTrace(loads.astype(np.int64)))
    return path


@pytest.fixture
def machine(tmp_path: Path) -> list[str | Path]:
    """Flags for a model of 16 experts on 4 ranks of H200."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    return ["--hardware", "h200", "--model-config", config, "--ep", "4"]


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    return save_loads(tmp_path / "skewed.npz", np.array([8.0, 8.0] + [1.0] * 14), 1 << 19)


def test_skewed_traffic_gets_told_to_balance(
    tmp_path: Path, skewed: Path, machine: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    report, plots = tmp_path / "advice.json", tmp_path / "plots"
    policies = "quota,eplb,exact,ideal"
    flags = ["--policies", policies, "--json", report, "--plots", plots]
    assert run("--trace", skewed, *machine, *flags) == 0
    document = json.loads(report.read_text())
    verdict = document["recommendation"]
    assert verdict["balance"] is True
    assert verdict["slots"] == 1  # the fewest that gain as much
    assert verdict["min_batch_tokens"] < 1 << 19
    outcomes = {(row["policy"], row["slots"]): row for row in document["outcomes"]}
    gains = {key: row["predicted_gain"] for key, row in outcomes.items()}
    assert gains["quota", 0] == 1
    least, most = verdict["predicted_gain_band"]
    assert (least - 1, most) == pytest.approx((0.1 * (most - 1), gains["quota", 1]))
    assert any(f"expect {least:.2f}x to {most:.2f}x" in reason for reason in verdict["reasons"])
    assert not any("one batch" in line for line in document["assumptions"])
    assert 1.1 < gains["quota", 1] <= gains["ideal", 0] < document["imbalance_now"]["mean"]
    assert outcomes["quota", 1]["imbalance"] < 1.02
    expert = 3 * 2048 * 1024 * 2
    assert outcomes["quota", 2]["memory_bytes"] == 2 * expert
    assert outcomes["eplb", 2]["memory_bytes"] == 2 * expert * 8
    assert {path.name for path in plots.iterdir()} == PICTURES
    assert all(path.read_bytes().startswith(PNG) for path in plots.iterdir())
    assert "Turn it on: --policy quota --slots 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "tokens", "reason"),
    [
        (np.ones(16), 1 << 19, "balanced already"),
        (np.array([8.0, 8.0] + [1.0] * 14), 512, "too small"),
    ],
)
def test_advice_may_be_to_leave_it_off(
    tmp_path: Path,
    machine: list[str | Path],
    capsys: pytest.CaptureFixture[str],
    weights: np.ndarray,
    tokens: int,
    reason: str,
) -> None:
    trace = save_loads(tmp_path / "trace.npz", weights, tokens)
    assert run("--trace", trace, *machine) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Leave it off." in printed
    assert reason in printed


def test_one_batch_is_too_little(
    tmp_path: Path, machine: list[str | Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace = save_loads(tmp_path / "trace.npz", np.arange(1.0, 17), 1 << 14, batches=1)
    run("--trace", trace, *machine, "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert any("one batch stands for all" in line for line in document["assumptions"])
    assert document["recommendation"]["predicted_gain_band"]


def test_domains_bound_the_gain(tmp_path: Path, skewed: Path, machine: list[str | Path]) -> None:
    report = tmp_path / "advice.json"
    run("--trace", skewed, *machine, "--domain-size", "2", "--json", report)
    document = json.loads(report.read_text())
    floor = document["imbalance_now"]["floor"]
    assert floor > 1.1
    assert all(
        row["imbalance"] >= floor - 0.01 for row in document["outcomes"] if row["policy"] == "quota"
    )
    assert any("domains of 2 ranks" in reason for reason in document["recommendation"]["reasons"])


def test_token_traces_and_measured_costs(tmp_path: Path, machine: list[str | Path]) -> None:
    rng = np.random.default_rng(1)
    ids = (rng.zipf(1.5, (4096, 2, 2)) % 16).astype(np.uint8)
    trace, costs, report = (tmp_path / name for name in ("t.npz", "costs.json", "advice.json"))
    save_trace(trace, Trace(ids, np.array([4096]), 16))
    costs.write_text(CostModel(1e-5, 10**6, 1e10, exchange_seconds=1e-4).to_json())
    flags = ["--hardware", "custom", "--costs", costs, "--batch-tokens", "1024", "--slots", "1"]
    assert run("--trace", trace, *machine[2:], *flags, "--json", report) == 0
    document = json.loads(report.read_text())
    assert document["batches"] == 3  # of four, the first is history only
    assert document["recommendation"]["balance"] is True
    assert document["costs"]["seconds_per_assignment"] == 1e-5
    answer = {"schema_version": 2, "costs": json.loads(costs.read_text())}
    logged = f"INFO 11-25 ultraep: costs {costs.read_text()}\nINFO 11-25 ready\n"
    costs.write_text('INFO 11-25 ultraep: costs {"seconds_per_assignment": 1}\n' + logged)
    assert run("--trace", trace, *machine[2:], *flags, "--json", report) == 0
    assert json.loads(report.read_text()) == document  # of the last server in the log
    costs.write_text(json.dumps(answer))
    assert run("--trace", trace, *machine[2:], *flags, "--json", report) == 0
    assert json.loads(report.read_text()) == document  # of `status --json`
    costs.write_text(json.dumps(answer | {"costs": None}))
    with pytest.raises(ConfigError, match="no costs yet"):
        run("--trace", trace, *machine[2:], *flags)


def test_decode_is_left_out(tmp_path: Path, machine: list[str | Path]) -> None:
    rng = np.random.default_rng(0)
    loads = rng.multinomial(1 << 18, np.ones(16) / 16, size=(6, 2, 4))
    loads[1::2] = np.eye(16, dtype=np.int64)[0] * 50  # decode: every token to one expert
    trace, report = tmp_path / "t.npz", tmp_path / "advice.json"
    save_trace(trace, LoadTrace(loads, np.array([0, 1] * 3)))
    run("--trace", trace, *machine, "--json", report)
    document = json.loads(report.read_text())
    assert document["batches"] == 2  # of three, the first is history only
    assert document["imbalance_now"]["max"] < 1.1
    save_trace(trace, LoadTrace(loads[1::2], np.ones(3, np.int64)))
    with pytest.raises(UltraEPError, match="decode only"):
        run("--trace", trace, *machine)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.zeros((2048, 2, 3), np.uint8), "3 experts per token"),
        (np.zeros((2048, 9, 2), np.uint8), "9 MoE layers"),
        (np.full((2048, 2, 2), 16, np.uint8), "17 experts"),
        (np.zeros((100, 2, 2), np.uint8), "less than one batch"),
    ],
)
def test_traces_of_other_models_are_refused(
    tmp_path: Path, machine: list[str | Path], ids: np.ndarray, words: str
) -> None:
    np.savez(tmp_path / "t.npz", topk_ids=ids, sequence_lengths=np.array([len(ids)], np.int32))
    with pytest.raises(UltraEPError, match=words):
        run("--trace", tmp_path / "t.npz", *machine, "--batch-tokens", "1024")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hardware", "a100"], "unknown hardware"),
        (["--hardware", "custom"], "go together"),
        (["--ep", "5"], "cannot be divided"),
        (["--ep", "0"], "1 or more"),
        (["--model-config", "deepseek-v3"], "the trace has 16 experts"),
        (["--model-config", "no-such-model"], "neither"),
        (["--slots", "a"], "--slots"),
        (["--policies", "magic"], "unknown policy"),
        (["--weights", "int3"], "unknown weight type"),
        (["--efficiency", "7"], "efficiency"),
        (["--operator-rates", "no-such-file"], "no-such-file"),
        (["--hardware=custom", "--costs=c", "--operator-rates=r"], "exclude each other"),
        (["--batch-tokens", "64"], "own batches"),
    ],
)
def test_bad_flags_leave_no_file(
    tmp_path: Path, skewed: Path, machine: list[str | Path], flags: list[str], words: str
) -> None:
    report, plots = tmp_path / "advice.json", tmp_path / "plots"
    with pytest.raises(UltraEPError, match=words):
        run("--trace", skewed, *machine, "--json", report, "--plots", plots, *flags)
    assert not report.exists()
    assert not plots.exists()
    assert not list(tmp_path.glob(".*"))


RATES = {
    "schema_version": 1, "source": "a measurement", "hardware": "h200", "weights": "bf16",
    "context_tokens": 4096, "hidden_size": 2048, "expert_size": 1024,
    "rates": {"expert_flops": 1e14, "dispatch_bytes_per_second": 1e11}, "command": "not needed",
}  # fmt: skip


def test_measured_rates_take_the_place_of_data_sheets(
    tmp_path: Path, skewed: Path, machine: list[str | Path]
) -> None:
    rates, report = tmp_path / "rates.json", tmp_path / "advice.json"
    rates.write_text(json.dumps(RATES))
    assert run("--trace", skewed, *machine, "--operator-rates", rates, "--json", report) == 0
    document = json.loads(report.read_text())
    expected = 6 * 2048 * 1024 / 1e14 + 2048 * 4 / 1e11
    assert document["costs"]["seconds_per_assignment"] == pytest.approx(expected)
    assert "a measurement" in document["assumptions"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rates": None}, "rates must be a JSON object"),
        ({"rates": {}}, "must have some of expert_flops"),
        ({"rates": {"speed": 1e12}}, "unknown rates .'speed'"),
        ({"rates": {"expert_flops": 0}}, "expert_flops = 0 must be"),
        ({"rates": {"expert_flops": float("nan")}}, "expert_flops = nan must be"),
        ({"rates": {"expert_flops": "1e15"}}, "expert_flops = '1e15' must be"),
        ({"schema_version": 2}, "schema_version 2 is not 1"),
        ({"source": 5}, "source must be text"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hardware": "gb200"}, "hold for hardware = gb200, not h200"),
        ({"weights": "fp8"}, "hold for weights = fp8, not bf16"),
        ({"context_tokens": 1024}, "hold for context_tokens = 1024, not 4096"),
        ({"expert_size": 512}, "hold for expert_size = 512, not 1024"),
    ],
)
def test_rates_of_something_else_are_refused(
    tmp_path: Path,
    skewed: Path,
    machine: list[str | Path],
    change: dict[str, object],
    words: str,
) -> None:
    rates, report = tmp_path / "rates.json", tmp_path / "advice.json"
    rates.write_text(json.dumps({**RATES, **change}))
    with pytest.raises(ConfigError, match=words):
        run("--trace", skewed, *machine, "--operator-rates", rates, "--json", report)
    assert not report.exists()


@pytest.mark.parametrize("name", sorted(set(RATES) - {"command", "schema_version"}))
def test_rates_say_what_is_missing(
    tmp_path: Path, skewed: Path, machine: list[str | Path], name: str
) -> None:
    rates = tmp_path / "rates.json"
    rates.write_text(json.dumps({key: RATES[key] for key in RATES if key != name}))
    with pytest.raises(ConfigError, match=f"rates.json: {name} is missing"):
        run("--trace", skewed, *machine, "--operator-rates", rates)


def test_broken_inputs_leave_no_file(
    tmp_path: Path, skewed: Path, machine: list[str | Path]
) -> None:
    report = tmp_path / "advice.json"
    broken = tmp_path / "broken.npz"
    broken.write_bytes(skewed.read_bytes()[:200])
    with pytest.raises(UltraEPError, match="truncated"):
        run("--trace", broken, *machine, "--json", report)
    (tmp_path / "config.json").write_text('{"hidden_size": 4')
    with pytest.raises(UltraEPError, match="JSON"):
        run("--trace", skewed, *machine, "--json", report)
    assert not report.exists()
    with pytest.raises(UltraEPError, match="cannot be written"):
        run("--trace", skewed, *machine, "--json", skewed / "advice.json")


class Sidecar(BaseHTTPRequestHandler):
    """Answers as a sidecar does; ``balance`` is set by the test."""

    balance: dict[str, Any] = {}  # noqa: RUF012  # one per test

    def do_GET(self) -> None:
        batches = {"batches": [{"tokens": 300_000}, {"tokens": 500_000}, {"tokens": 400_000}]}
        answer = batches if self.path.startswith("/v1/balance/batches") else type(self).balance
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sidecar() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Sidecar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def figures(before: float | None, after: float | None, policy: str) -> dict[str, Any]:
    return {
        "num_ranks": 4,
        "policy": policy,
        "imbalance": {"before": {"mean": before, "max": before}, "after": {"mean": after}},
        "layers": [],
    }


def test_a_live_server_is_advised_with_what_it_cannot_tell(
    tmp_path: Path, machine: list[str | Path], sidecar: str
) -> None:
    report = tmp_path / "advice.json"
    Sidecar.balance = figures(2.0, 1.01, "quota")
    assert run("--sidecar", sidecar, *machine, "--json", report) == 0
    document = json.loads(report.read_text())
    assert document["recommendation"]["balance"] is True
    assert document["batch_tokens"] == 400_000
    assert document["imbalance_after_is_measured"] is True
    assert any("use a trace" in line for line in document["assumptions"])
    Sidecar.balance = figures(1.01, 1.01, "quota")
    run("--sidecar", sidecar, *machine, "--json", report)
    assert json.loads(report.read_text())["recommendation"]["balance"] is False


@pytest.mark.parametrize(
    ("balance", "flags", "words"),
    [
        (figures(None, None, "off"), [], "measured no batch"),
        ({"object": "list"}, [], "sidecar's address"),
        (figures(2.0, 1.0, "quota"), ["--ep", "8"], "the server has 4 ranks"),
        (figures(2.0, 1.0, "quota"), ["--plots", "x"], "no expert loads"),
    ],
)
def test_a_live_server_that_cannot_be_advised(
    machine: list[str | Path],
    sidecar: str,
    balance: dict[str, Any],
    flags: list[str],
    words: str,
) -> None:
    Sidecar.balance = balance
    with pytest.raises(UltraEPError, match=words):
        run("--sidecar", sidecar, *machine, *flags)
