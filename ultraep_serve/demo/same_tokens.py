"""The check that users care for most: the same tokens with balancing on."""

import random
from contextlib import closing

import httpx
import numpy as np
from numpy.typing import NDArray

from ultraep_serve.client.greedy_tokens import Generation, TokenComparison, compare_tokens, generate
from ultraep_serve.client.sidecar import Sidecar
from ultraep_serve.demo.balanced_server import BalancedServer
from ultraep_serve.demo.text import DOMAINS, sample_text
from ultraep_serve.types import Policy

__all__ = ["check_tokens", "generate_under", "mixed_prompts", "prompt_logprobs"]

_SHORTEST, _LONGEST = 16, 1500  # tokens; from decode-sized to several times min_batch_tokens


def mixed_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` texts of mixed lengths, taking turns between the domains."""
    chooser = random.Random(seed)
    return [
        sample_text(
            DOMAINS[number % len(DOMAINS)], chooser.randint(_SHORTEST, _LONGEST), seed + number
        )
        for number in range(count)
    ]


def generate_under(
    server: BalancedServer,
    policy: Policy,
    prompts: list[str],
    max_tokens: int = 16,
    concurrency: int = 4,
) -> list[Generation]:
    """Greedy completions of ``prompts`` with ``policy`` in force."""
    _set_policy(server, policy)
    return generate(server.url, server.model, prompts, max_tokens, concurrency)


def check_tokens(
    server: BalancedServer, prompts: list[str], max_tokens: int = 16, concurrency: int = 4
) -> TokenComparison:
    """Compare greedy tokens with balancing off against on, in one running server."""
    off = generate_under(server, Policy.OFF, prompts, max_tokens, concurrency)
    on = generate_under(server, Policy.QUOTA, prompts, max_tokens, concurrency)
    return compare_tokens(off, on)


def prompt_logprobs(
    server: BalancedServer, policy: Policy, prompts: list[str]
) -> list[NDArray[np.float64]]:
    """Log-probability of every prompt token but the first, per prompt, with ``policy`` in force.

    The same tokens whatever the model prefers, so that two runs compare position by position.
    """
    _set_policy(server, policy)
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


def _set_policy(server: BalancedServer, policy: Policy) -> None:
    with closing(Sidecar(server.sidecar_url, server.token)) as sidecar:
        sidecar.set_policy(policy)
