"""Rates out of tables of measured operators, as ``benchmarks/operator_rates.py`` reads them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ultraep_serve.costs.operator_rates import MeasuredRates
from ultraep_serve.costs.shapes import model_shape

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QWEN = model_shape("qwen3-235b-a22b")
OPTIONS = SimpleNamespace(engine="sglang", weights="bf16", ep=40, context=4096)
SAME = {"framework": "E", "version": "1"}
EXPERTS = {
    **SAME, "moe_dtype": "bfloat16", "distribution": "balanced", "moe_tp_size": 1, "topk": 8,
    "hidden_size": 4096, "inter_size": 1536, "num_experts": 128,
}  # fmt: skip
HEADS = {
    **SAME, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "step": 0, "window_size": 0,
    "num_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "isl": 4096, "batch_size": 2,
}  # fmt: skip
SENT = {
    **SAME, "kernel_source": "NVLinkTwoSided", "moe_dtype": "bfloat16", "num_tokens": 8192,
    "hidden_size": 7168, "topk": 8,
}  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import operator_rates  # type: ignore[import-not-found]  # a script, on no path of mypy's

    yield operator_rates
    del sys.modules["operator_rates"]


def table(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    path = folder / f"{name}.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_rates_by_hand(tmp_path: Path, script: ModuleType) -> None:
    run = {"num_tokens": 1 << 14, "moe_ep_size": 2}  # 65536 assignments on a rank
    few = {"num_tokens": 16, "moe_ep_size": 4}  # every expert has one assignment
    experts = [
        {**EXPERTS, **run, "latency": 6.0},
        {**EXPERTS, **run, "latency": 5.0},  # a faster kernel
        {**EXPERTS, **run, "latency": 1.0, "distribution": "power_law"},
        {**EXPERTS, **run, "latency": 1.0, "moe_ep_size": 1},
        {**EXPERTS, **run, "latency": 1.0, "inter_size": 3072},
        {**EXPERTS, **few, "latency": 0.2},
        {**EXPERTS, "num_tokens": 1, "moe_ep_size": 4, "latency": 0.01},  # not all weights read
    ]
    table(tmp_path, "moe/sglang/0.5.9/moe_perf", [{**EXPERTS, **run, "latency": 1.0}])
    table(tmp_path, "moe/sglang/0.5.10/moe_perf", experts)  # newer, though not by its letters
    heads = [HEADS | {"latency": 0.5}, HEADS | {"num_key_value_heads": 8, "latency": 0.1}]
    table(tmp_path, "attention/sglang/1/context_attention_perf", heads)
    steps = [
        {**SENT, "op_name": name, "moe_ep_size": ranks, "latency": latency}
        for ranks, factor in ((16, 1), (32, 2), (64, 3))
        for name, latency in (("dispatch", factor * 1.0), ("combine", factor * 1.5))
    ]
    low = {**SENT, "op_name": "combine_low_precision", "moe_ep_size": 32, "latency": 9.0}
    table(tmp_path, "comm/trtllm/1/trtllm_alltoall_perf", [*steps, low])
    rates = {name: rate.value for name, rate in script.rates(tmp_path, QWEN, OPTIONS).items()}
    expert = 3 * 4096 * 1536
    assert rates == {  # no projections were measured
        "expert_flops": pytest.approx(2 * expert * 65536 / 5e-3),
        "memory_bytes_per_second": pytest.approx(32 * expert * 2 / 0.2e-3),
        "attention_flops": pytest.approx(8192 * 4 * 64 * 128 * 2048 / 0.5e-3),
        "dispatch_bytes_per_second": pytest.approx(8192 * 8 * 7168 * 4 / 5e-3),  # of 32 GPUs
    }


def test_the_nearest_sizes_stand_for_those_that_were_not_measured(
    tmp_path: Path, script: ModuleType
) -> None:
    run = {"num_tokens": 1 << 14, "moe_ep_size": 2, "latency": 5.0}
    other = {"hidden_size": 7168, "inter_size": 2048, "num_experts": 256}
    table(tmp_path, "moe/sglang/1/moe_perf", [EXPERTS | run, EXPERTS | run | other])
    products = [
        {**SAME, "gemm_dtype": "bfloat16", "m": 8192, "n": n, "k": 5120, "latency": 1.0}
        for n in (1024, 12288, 51200)
    ]
    table(tmp_path, "gemm/sglang/1/gemm_perf", products)
    found = script.rates(tmp_path, model_shape("glm-4.7"), OPTIONS)
    assert "128 experts of 4096 x 1536" in found["expert_flops"].what
    assert found["dense_flops"].value == pytest.approx(2 * 8192 * 12288 * 5120 / 1e-3)
    assert "attention_flops" not in found


def test_without_the_package_it_says_how_to_install_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--hardware", "gb200", "--model-config", "glm-4.7", "--ep", "40"]
    monkeypatch.setattr(sys, "argv", ["operator_rates.py", *flags])
    with pytest.raises(SystemExit, match=r"pip install aiconfigurator-core==0\.12\.0"):
        script.main()


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results/operator_rates").iterdir()))
def test_committed_rates_can_be_read_and_say_what_was_measured(path: Path) -> None:
    engine, model = path.stem.split("-", 1)
    rates = MeasuredRates.from_file(path)
    rates.check(model_shape(model), "gb200", "bf16", 4096)
    assert engine in rates.source
    assert set(json.loads(path.read_text())["measured"]) == set(rates.rates)
