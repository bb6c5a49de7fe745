"""The workload changes its domain half way: SGLang's own EPLB against balancing batch by batch.

    .venv-sglang/bin/python benchmarks/sglang_eplb.py

Two servers of one model, side by side: one balanced by ``quota`` (and switched off for every other
request, which is the "before"), one with SGLang's EPLB, as many redundant experts per layer as the
other has slots, and rebalancing far more often than its default of 1000 passes. Every prompt goes
to both, in changing order, while the idle server sleeps.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import harness
import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from served import CONTEXT, WORK, model

from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.balanced_server import BalancedServer, expert_parallel_flags
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.types import Policy

SLOTS = 2
VARIANTS = ("off", "sglang-eplb", "quota")


def main() -> None:
    """Serve, measure both phases, print a table, write the JSON."""
    parser = harness.parser(__doc__, "sglang-eplb.json")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=20, help="per phase")
    parser.add_argument("--rebalance-every", type=int, default=6, help="EPLB: forward passes")
    options = parser.parse_args()
    rows = measure(options)
    document = {
        "prompt_tokens": options.prompt_tokens,
        "rebalance_every": options.rebalance_every,
        "slots_per_rank": SLOTS,
        "phases": [summary(rows, domain) for domain in DOMAINS],
        "prompts": rows,
    }
    harness.write(options.json, document)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per prompt: seconds to first token and imbalance of every variant."""
    ours, theirs = servers(options.rebalance_every)
    with (
        ours,
        theirs,
        closing(Server(ours.url)) as server,
        closing(Server(theirs.url)) as rebalancing,
        closing(Sidecar(ours.sidecar_url, ours.token)) as sidecar,
    ):
        run: dict[str, Callable[[str], dict[str, Any]]] = {
            "off": partial(with_policy, server, sidecar, Policy.OFF),
            "quota": partial(with_policy, server, sidecar, Policy.QUOTA),
            "sglang-eplb": partial(with_eplb, rebalancing),
        }
        for variant in VARIANTS:  # warm up, not measured
            run[variant](sample_text(DOMAINS[0], options.prompt_tokens, 0))
        orders = itertools.cycle(itertools.permutations(VARIANTS))
        rows = []
        for domain in DOMAINS:
            for number in range(options.prompts):
                prompt = sample_text(domain, options.prompt_tokens, 100 + number)
                results = {variant: run[variant](prompt) for variant in next(orders)}
                results["off"]["imbalance"] = results["quota"].pop("before")
                rows.append({"domain": domain, "number": number, **results})
                print(rows[-1], flush=True)
    return rows


def servers(rebalance_every: int) -> tuple[BalancedServer, BalancedServer]:
    """Ours and SGLang's own, not started."""
    path = model("qwen3")
    flags = [*expert_parallel_flags("tensor", "bfloat16", CONTEXT, "sglang"), "--slots", str(SLOTS)]
    ours = BalancedServer(path, flags, WORK / "eplb-ours.log", engine="sglang")
    return ours, eplb_server(path, WORK / "eplb-theirs.log", rebalance_every)


def eplb_server(
    path: Path, log_path: Path, rebalance_every: int = 6, prefix_cache: bool = False
) -> BalancedServer:
    """SGLang with its own balancer, which rebalances after so many forward passes."""
    flags = expert_parallel_flags("tensor", "bfloat16", CONTEXT, "sglang", prefix_cache)
    eplb = ["--policy", "off", "--enable-eplb", "--ep-num-redundant-experts", str(2 * SLOTS)]
    eplb += ["--eplb-rebalance-num-iterations", str(rebalance_every)]
    eplb += ["--expert-distribution-recorder-buffer-size", str(rebalance_every)]
    eplb += ["--expert-balancedness-report-mode", "prometheus", "--enable-metrics"]
    return BalancedServer(path, [*flags, *eplb], log_path, engine="sglang")


def with_policy(server: Server, sidecar: Sidecar, policy: Policy, prompt: str) -> dict[str, Any]:
    """Our server under ``policy``; the imbalance of what it computed, and before balancing."""
    sidecar.set_policy(policy)
    since_ns = time.time_ns()
    seconds = server.first_token(prompt).seconds
    if policy is Policy.OFF:
        return {"seconds": seconds}
    imbalance = sidecar.balance(since_ns, policy)["imbalance"]
    return {
        "seconds": seconds,
        "before": imbalance["before"]["mean"],
        "imbalance": imbalance["after"]["mean"],
    }


def with_eplb(server: Server, prompt: str) -> dict[str, Any]:
    """SGLang's own balancer; no imbalance where it reported no pass."""
    total, count = balancedness(server.url)
    seconds = server.first_token(prompt).seconds
    new_total, new_count = balancedness(server.url)
    passes = new_count - count
    return {"seconds": seconds, "imbalance": passes / (new_total - total) if passes else None}


def balancedness(url: str) -> tuple[float, float]:
    """SGLang's own figure, mean/max over ranks averaged over layers: (sum, passes) of prefills."""
    text = httpx.get(f"{url}/metrics", timeout=30.0).text
    total = passes = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "extend" in sample.labels.get("forward_mode", "").lower():
                total += sample.value if sample.name == "sglang:eplb_balancedness_sum" else 0.0
                passes += sample.value if sample.name == "sglang:eplb_balancedness_count" else 0.0
    return total, passes


def summary(rows: list[dict[str, Any]], domain: str) -> dict[str, Any]:
    """Medians of a phase, its first prompts (just after the switch) apart."""
    phase = [row for row in rows if row["domain"] == domain]
    parts = {"first_quarter": phase[: len(phase) // 4], "rest": phase[len(phase) // 4 :]}
    document: dict[str, Any] = {"domain": domain}
    for name, part in parts.items():
        document[name] = {
            variant: {
                "ttft_seconds": float(np.median([row[variant]["seconds"] for row in part])),
                "imbalance": float(np.mean([row[variant]["imbalance"] for row in part])),
                "off_over_this": float(
                    np.median([row["off"]["seconds"] / row[variant]["seconds"] for row in part])
                ),
            }
            for variant in VARIANTS
        }
        print(domain, name, document[name])
    return document


if __name__ == "__main__":
    main()
