"""Rates for `advise --operator-rates`, from operators that NVIDIA measured for aiconfigurator.

    pip install aiconfigurator-core==0.12.0
    python benchmarks/operator_rates.py --hardware gb200 --model-config qwen3-235b-a22b --ep 64 \\
        --json rates.json

Needs no GPU: the package holds measured times of single operators. What is read, of several kernels
the fastest:

- routed experts: evenly loaded, the rows with most assignments on a rank; where the model's sizes
  were not measured, the nearest that were. Rows of a single rank are left out: some read weights
  faster than memory can deliver;
- weights read: of the same rows, the most bytes of experts per second where every expert has work;
- projections: one matrix product of about the model's sizes with 8192 tokens;
- attention: causal, BF16, prompts of --context tokens, heads as the model's;
- dispatch and combine: 8192 tokens per rank over as many GPUs as --ep, or up to twice or half as
  many, all joined by NVLink.

What was not measured for a model is left out: `advise` then takes it from the data sheet.
"""

import argparse
import importlib.util
import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import harness

from ultraep_serve.costs.operator_rates import RATES_SCHEMA_VERSION, MeasuredRates
from ultraep_serve.costs.shapes import WEIGHT_BITS, ModelShape, model_shape
from ultraep_serve.errors import UltraEPError, UnsupportedError
from ultraep_serve.system.files import write_json

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "gb200": "gb200"}
TYPES = {"bf16": "bfloat16", "fp8": "fp8_block", "fp4": "nvfp4"}
SENT_TYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}
USUAL_HEAD = 128
TOKENS = 8192  # of one rank: prefill
LATENT_CACHE, LATENT_SCORE = 576, 640  # DeepSeek's attention: values cached, FLOPs per head
Row = dict[str, Any]


@dataclass(frozen=True)
class Rate:
    """One rate per second, and what was measured."""

    value: float
    what: str


def main() -> None:
    """Read the tables, print the rates and write them to --json."""
    parser = harness.parser(__doc__)
    parser.add_argument("--hardware", required=True, choices=SYSTEMS)
    parser.add_argument("--model-config", required=True, metavar="MODEL")
    parser.add_argument("--ep", type=int, required=True, metavar="N")
    parser.add_argument("--weights", default="bf16", choices=TYPES)
    parser.add_argument("--context", type=int, default=4096, metavar="N")
    parser.add_argument("--engine", default="sglang", choices=("sglang", "vllm", "trtllm"))
    try:
        options = parser.parse_args()
        shape = model_shape(options.model_config)
        found = rates(tables(options.hardware), shape, options)
        document = MeasuredRates(
            source=f"{PACKAGE} {VERSION}, {options.hardware}, {options.engine}",
            hardware=options.hardware,
            weights=options.weights,
            context_tokens=options.context,
            hidden_size=shape.hidden_size,
            expert_size=shape.expert_size,
            rates={name: float(f"{rate.value:.4g}") for name, rate in found.items()},
        )
    except UltraEPError as error:
        raise SystemExit(f"error: {error}") from None
    for name, rate in found.items():
        print(f"{name:26} {rate.value:.4g} per second: {rate.what}")
    measured = {name: rate.what for name, rate in found.items()}
    written = {"schema_version": RATES_SCHEMA_VERSION, **vars(document), "measured": measured}
    if options.json is not None:
        write_json(options.json, {**written, "command": harness.command()})


def tables(hardware: str) -> Path:
    """The package's folder of measured times. Raises UnsupportedError where it is missing."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or metadata.version(PACKAGE) != VERSION:
        raise UnsupportedError(
            f"measured times are missing: pip install {PACKAGE}=={VERSION} (Linux x86-64, "
            "Python 3.11 or later; an environment of its own will do)"
        )
    (package,) = spec.submodule_search_locations or ()
    return Path(package, "systems", "data", SYSTEMS[hardware])


def rates(folder: Path, shape: ModelShape, options: argparse.Namespace) -> dict[str, Rate]:
    """Rates by their names in ``Rates``, as far as they were measured."""
    engine, weights = options.engine, options.weights
    found = {
        **expert_rates(folder, shape, engine, weights),
        "dense_flops": dense_rate(folder, shape, engine, weights),
        "attention_flops": attention_rate(folder, shape, engine, options.context),
        "dispatch_bytes_per_second": dispatch_rate(folder, shape, options.ep, weights),
    }
    return {name: rate for name, rate in found.items() if rate is not None}


def rows(folder: Path, family: str, engine: str, table: str, **equal: Any) -> list[Row]:
    """Rows of the newest table that has any with these values; none where there is no table."""
    import pyarrow.parquet

    paths = folder.glob(f"{family}/{engine}/*/{table}.parquet")
    newest_first = sorted(
        paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parent.name)], reverse=True
    )
    filters = [(name, "=", value) for name, value in equal.items()]
    for path in newest_first:
        if found := pyarrow.parquet.read_table(path, filters=filters).to_pylist():
            return [row for row in found if row["latency"] > 0]
    return []


def nearest(found: list[Row], **wanted: float) -> list[Row]:
    """Those rows whose sizes are nearest to ``wanted``, by the sum of their logarithms' errors."""

    def distance(row: Row) -> float:
        return sum(abs(math.log(row[name] / value)) for name, value in wanted.items())

    least = min(map(distance, found), default=0.0)
    return [row for row in found if distance(row) <= least + 1e-9]


def most(found: Iterable[Row], size: Callable[[Row], float]) -> list[Row]:
    """Those rows whose ``size`` is the largest."""
    listed = list(found)
    largest = max(map(size, listed))
    return [row for row in listed if size(row) == largest]


def expert_rates(
    folder: Path, shape: ModelShape, engine: str, weights: str
) -> dict[str, Rate | None]:
    """Computing experts, and reading their weights."""
    equal = {"moe_dtype": TYPES[weights], "distribution": "balanced", "moe_tp_size": 1}
    found = rows(folder, "moe", engine, "moe_perf", **equal)
    found = [row for row in found if row["moe_ep_size"] > 1]
    found = nearest(found, hidden_size=shape.hidden_size, inter_size=shape.expert_size)
    found = nearest(found, num_experts=shape.num_experts, topk=shape.experts_per_token)
    if not found:
        return {}
    one = found[0]
    expert = 3 * one["hidden_size"] * one["inter_size"]
    sizes = f"{one['num_experts']} experts of {one['hidden_size']} x {one['inter_size']}"

    def assignments(row: Row) -> float:
        return float(row["num_tokens"] * row["topk"] / row["moe_ep_size"])

    def bytes_per_second(row: Row) -> float:
        held = row["num_experts"] / row["moe_ep_size"]
        return float(held * expert * WEIGHT_BITS[weights] / 8 / seconds(row))

    full = min(most(found, assignments), key=seconds)
    busy = [row for row in found if row["num_tokens"] * row["topk"] >= row["num_experts"]]
    read = max(busy, key=bytes_per_second)
    return {
        "expert_flops": Rate(
            2 * expert * assignments(full) / seconds(full),
            f"{sizes} ({version(full)}), {assignments(full):.0f} assignments",
        ),
        "memory_bytes_per_second": Rate(
            bytes_per_second(read),
            f"{sizes} ({version(read)}), {read['num_experts'] // read['moe_ep_size']} held, "
            f"{assignments(read):.0f} assignments",
        ),
    }


def dense_rate(folder: Path, shape: ModelShape, engine: str, weights: str) -> Rate | None:
    """One matrix product: half of a layer's projections."""
    found = rows(folder, "gemm", engine, "gemm_perf", gemm_dtype=TYPES[weights], m=TOKENS)
    width = shape.attention_weights / 2 / shape.hidden_size
    if not (found := nearest(found, n=width, k=shape.hidden_size)):
        return None
    best = min(found, key=seconds)
    m, n, k = best["m"], best["n"], best["k"]
    return Rate(2 * m * n * k / seconds(best), f"{m} x {k} by {k} x {n} ({version(best)})")


def attention_rate(folder: Path, shape: ModelShape, engine: str, context: int) -> Rate | None:
    """Scores and values of causal attention; each token sees half of its prompt."""
    equal = {"isl": context, "step": 0, "kv_cache_dtype": "bfloat16"}
    if shape.kv_values == LATENT_CACHE:
        heads = shape.score_flops / LATENT_SCORE
        equal |= {"mla_dtype": "bfloat16", "num_heads": heads}
        found = rows(folder, "mla", engine, "context_mla_perf", **equal)
    else:
        equal |= {"attn_dtype": "bfloat16", "window_size": 0}
        found = [
            row
            for row in rows(folder, "attention", engine, "context_attention_perf", **equal)
            if 4 * row["num_heads"] * row["head_dim"] == shape.score_flops
            and 2 * row["num_key_value_heads"] * row["head_dim"] == shape.kv_values
        ]
        found = nearest(found, head_dim=USUAL_HEAD)  # a shape does not say it: 8 x 512 = 32 x 128
    if not (found := nearest(found, batch_size=max(1.0, TOKENS / context))):
        return None
    one, batch = found[0], found[0]["batch_size"]
    flops = batch * context * shape.score_flops * context / 2
    time = statistics.median(map(seconds, found))  # of repeats
    return Rate(flops / time, f"{one['num_heads']} heads, {batch} x {context} ({version(one)})")


def dispatch_rate(folder: Path, shape: ModelShape, ranks: int, weights: str) -> Rate | None:
    """Dispatch and combine (BF16) of every assignment, inside an NVLink domain."""
    sent = SENT_TYPES[weights]
    two_sided = rows(
        folder, "comm", "trtllm", "trtllm_alltoall_perf", num_tokens=TOKENS, moe_dtype=sent,
        kernel_source="NVLinkTwoSided",
    )  # fmt: skip
    deepep = rows(
        folder, "comm", "trtllm", "moe_a2a_perf", num_tokens=TOKENS,
        comm_backend="trtllm_deepep_ht", node_num=1,
    )  # fmt: skip
    steps = [
        *({**row, "ep_size": row["moe_ep_size"], "step": row["op_name"]} for row in two_sided),
        *(
            {**row, "latency": row["latency"] / 1e3, "step": row["phase"]}  # microseconds
            for row in deepep
            if row["comm_dtype"] == (sent if row["phase"] == "dispatch" else "bfloat16")
        ),
    ]
    steps = [row for row in steps if ranks / 2 <= row["ep_size"] <= 2 * ranks]
    steps = nearest(steps, ep_size=ranks)
    steps = nearest(steps, hidden_size=shape.hidden_size, topk=shape.experts_per_token)
    if not steps:
        return None
    by_kernel: dict[str, dict[str, float]] = {}
    for row in steps:
        if not row["step"].endswith("low_precision"):
            by_kernel.setdefault(row["kernel_source"], {})[row["step"]] = seconds(row)
    kernel, times = min(by_kernel.items(), key=lambda item: sum(item[1].values()))
    one = steps[0]
    dispatched = 2 + (2 if weights == "bf16" else 1)
    return Rate(
        TOKENS * one["topk"] * one["hidden_size"] * dispatched / sum(times.values()),
        f"{kernel} ({version(one)}), {one['ep_size']} GPUs, top-{one['topk']}, "
        f"{one['hidden_size']} wide",
    )


def seconds(row: Row) -> float:
    """The tables' milliseconds."""
    return float(row["latency"]) / 1e3


def version(row: Row) -> str:
    """Engine and version that ran the operator."""
    return f"{row['framework']} {row['version']}"


if __name__ == "__main__":
    main()
