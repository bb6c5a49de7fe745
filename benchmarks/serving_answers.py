"""Whether answers change with balancing: greedy tokens, log-probabilities and perplexity."""

import argparse
import itertools
import shutil
from typing import Any, NamedTuple

import harness  # noqa: F401
import httpx
import numpy as np
from numpy.typing import NDArray
from permute import permute_experts
from served import WORK, model, serve

from tests.support.quantised import quantise
from ultraep_lab.bench.greedy_tokens import Generation, compare_tokens
from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    check_tokens,
    generate_under,
    mixed_prompts,
)
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.types import Policy

PERPLEXITY_TOKENS = 2048  # of a prompt


def tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens, off against quota, in both parallel modes, compiled and eager."""
    prompts = mixed_prompts(options.prompts)
    rows = []
    is_vllm = options.engine == "vllm"
    modes, eagerness = (("tensor", "data"), (False, True)) if is_vllm else (("tensor",), (False,))
    cases = itertools.product(("float32", "bfloat16"), modes, eagerness)
    for dtype, options.mode, options.eager in cases:
        with serve(options, model(options.model), dtype) as running:
            check = check_tokens(running, prompts, concurrency=1).to_json(dtype)
        rows.append({"mode": options.mode, "eager": options.eager, **check})
        print(rows[-1], flush=True)
    return {"model": options.model, "max_tokens": 16, "rows": rows}


def quantised(options: argparse.Namespace) -> dict[str, Any]:
    """The same in every format that vLLM's kernels for AMX take, compiled and tensor parallel."""
    prompts, rows = mixed_prompts(options.prompts), []
    for scheme in ("fp8", "int8", "int4", "mxfp4"):
        path = WORK / "models" / f"{options.model}-{scheme}"
        shutil.rmtree(path, ignore_errors=True)
        quantise(model(options.model), path, scheme)
        with serve(options, path, "bfloat16") as running:
            check = check_tokens(running, prompts, concurrency=1).to_json("bfloat16")
            found = httpx.get(f"{running.sidecar_url}/v1/balance").raise_for_status().json()
        rows.append({"scheme": scheme, "imbalance": found["imbalance"], **check})
        print(rows[-1], flush=True)
    return {"model": options.model, "max_tokens": 16, "rows": rows}


def logprobs(options: argparse.Namespace) -> dict[str, Any]:
    """bfloat16: how far log-probabilities move with balancing, and with another order alone.

    The control serves the same experts under other numbers, so on other ranks, without balancing:
    mathematically the same model, with sums taken in another order.
    """
    prompts = mixed_prompts(options.prompts)
    path = model(options.model)
    with serve(options, path, "bfloat16") as running:
        off, quota = (answers(running, policy, prompts) for policy in (Policy.OFF, Policy.QUOTA))
    permuted = permute_experts(path, WORK / "models" / f"{options.model}-permuted", seed=1)
    with serve(options, permuted, "bfloat16") as running:
        control = answers(running, Policy.OFF, prompts)
    document: dict[str, Any] = {
        "model": options.model,
        "mode": options.mode,
        "prompts": len(prompts),
        "quota": difference(off, quota),
        "control": difference(off, control),
    }
    for name in ("quota", "control"):
        print(name, document[name])
    return document


def perplexity(options: argparse.Namespace) -> dict[str, Any]:
    """Of made-up text in the model's own type: off, quota, and off once more as a control."""
    prompts = [
        sample_text(DOMAINS[i % len(DOMAINS)], PERPLEXITY_TOKENS, seed=i)
        for i in range(options.prompts)
    ]
    with serve(options, model(options.model), "bfloat16") as running:
        off, quota, again = (
            prompt_logprobs(running, policy, prompts)
            for policy in (Policy.OFF, Policy.QUOTA, Policy.OFF)
        )
    document = {
        "model": options.model,
        "mode": options.mode,
        "prompts": len(prompts),
        "positions": sum(map(len, off)),
        "perplexity": {"off": of_text(off), "quota": of_text(quota), "off again": of_text(again)},
        "quota_over_off": perplexity_ratio(quota, off),
        "off_again_over_off": perplexity_ratio(again, off),
    }
    print(document, flush=True)
    return document


def of_text(logprobs: list[NDArray[np.float64]]) -> float:
    """Perplexity: the exponential of minus the mean log-probability of all tokens."""
    return float(np.exp(-np.concatenate(logprobs).mean()))


def perplexity_ratio(
    one: list[NDArray[np.float64]], other: list[NDArray[np.float64]]
) -> dict[str, Any]:
    """How many times the other's perplexity one's is, and where that lies with 95 % confidence.

    Prompts are the samples: tokens of one prompt depend on each other.
    """
    apart = np.array([(b - a).mean() for a, b in zip(one, other, strict=True)])
    half = 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
    middle = apart.mean()
    ratio, low, high = np.exp([middle, middle - half, middle + half]).tolist()
    changed = np.concatenate(one) != np.concatenate(other)
    return {"ratio": ratio, "interval": [low, high], "changed": float(changed.mean())}


class Answers(NamedTuple):
    """What one server said to all prompts."""

    logprobs: list[NDArray[np.float64]]  # by prompt, of its tokens
    tokens: list[Generation]


def answers(running: BalancedServer, policy: Policy, prompts: list[str]) -> Answers:
    """Both, with ``policy`` in force."""
    return Answers(
        prompt_logprobs(running, policy, prompts), generate_under(running, policy, prompts)
    )


def prompt_logprobs(
    server: BalancedServer, policy: Policy, prompts: list[str]
) -> list[NDArray[np.float64]]:
    """Log-probability of every prompt token but the first, per prompt, with ``policy`` in force.

    The same tokens whatever the model prefers, so that two runs compare position by position.
    """
    server.set_policy(policy)
    rows = []
    with httpx.Client(timeout=600.0, trust_env=False) as client:
        for prompt in prompts:
            request = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            reply = client.post(
                f"{server.url}/v1/completions", json={**request, "echo": True, "logprobs": 1}
            )
            reply.raise_for_status()
            values = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
            rows.append(np.array(values[1:-1], np.float64))  # without the first and the new one
    return rows


def difference(one: Answers, other: Answers) -> dict[str, float]:
    """How far log-probabilities are apart, position by position, and how many tokens are alike."""
    apart = np.abs(np.concatenate(one.logprobs) - np.concatenate(other.logprobs))
    return {
        "mean": float(apart.mean()),
        "p99": float(np.quantile(apart, 0.99)),
        "max": float(apart.max()),
        "positions": int(apart.size),
        "changed": float((apart > 0).mean()),
        "identical_prompts": compare_tokens(one.tokens, other.tokens).identical,
    }
