"""Time of a step of decode, with and without expert parallelism, and what routing explains."""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

import httpx
import numpy as np
from served import model, serve, serve_without_ep

from ultraep_lab.bench.prefill import WITHOUT_EP, balanced_orders, ratios_json
from ultraep_lab.bench.sidecar import CaptureSidecar
from ultraep_lab.captured import assemble
from ultraep_lab.demo.balanced_server import BalancedServer
from ultraep_lab.demo.server_process import ServerProcess
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_lab.trace import DECODE, Trace, of_phase
from ultraep_serve.types import Policy

REQUESTS = (1, 4, 8)  # that are decoded together
PROMPT_TOKENS, NEW_TOKENS = 16, 64
_FIRST = 8  # steps that are not counted: prompts may still be computed
_SETTLE_SECONDS = 1.2  # an engine polls for a while when it has answered
_PAIRS = (("quota", WITHOUT_EP), ("off", WITHOUT_EP), ("quota", "off"))
_CAPTURE_BYTES = 16 << 20


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of decode with ``off``, ``quota`` and without expert parallelism."""
    rows, path = [], model(options.model)
    with (
        serve_without_ep(options, path, "bfloat16") as plain,
        serve(options, path, "bfloat16") as running,
    ):
        for requests in REQUESTS:
            found = _measured(running, plain, requests, options.repeats)
            rows.append({"requests": requests, **found})
            print({key: value for key, value in rows[-1].items() if key != "samples"})
    lengths = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
    return {"model": options.model, "mode": options.mode, **lengths, "rows": rows}


def _measured(
    running: BalancedServer, plain: ServerProcess, requests: int, repeats: int
) -> dict[str, Any]:
    """Rounds in which each variant decodes the same prompts once."""
    variants = [Policy.OFF.value, Policy.QUOTA.value, WITHOUT_EP]
    orders = balanced_orders(variants)
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(-1, repeats):
        for variant in orders[number % len(orders)]:
            if variant != WITHOUT_EP:
                running.set_policy(Policy(variant))
            time.sleep(_SETTLE_SECONDS)
            seconds = step_seconds(plain if variant == WITHOUT_EP else running, requests, number)
            if number >= 0:
                samples[variant].append(seconds)
    paired = {
        f"{above}_over_{below}": ratios_json(
            [one / other for one, other in zip(samples[above], samples[below], strict=True)]
        )
        for above, below in _PAIRS
    }
    return {
        "step_seconds": {variant: median(each) for variant, each in samples.items()},
        "paired": paired,
        "experts_read": _experts_read(running, requests, repeats),
        "samples": samples,
    }


def step_seconds(server: ServerProcess, requests: int, number: int) -> float:
    """Median time between tokens of the first of ``requests`` prompts that are sent together."""
    seeds = range(1000 + number * requests, 1000 + (number + 1) * requests)
    body = {
        "model": server.model,
        "prompt": [sample_text(DOMAINS[0], PROMPT_TOKENS, seed) for seed in seeds],
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    arrived = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["index"] == 0:
                arrived.append(time.perf_counter())
    return float(np.median(np.diff(arrived)[_FIRST:]))


def _experts_read(running: BalancedServer, requests: int, number: int) -> dict[str, float]:
    """Whose weights a rank reads in a layer of a step, means: of the busiest rank and of both.

    Without expert parallelism each rank reads half of every expert, as many bytes as the mean has.
    """
    with closing(CaptureSidecar(running.sidecar_url, running.token)) as sidecar:
        capture = sidecar.start("tokens", _CAPTURE_BYTES)
        step_seconds(running, requests, number)
        sidecar.stop()
        trace = assemble(sidecar.spools(capture))
        sidecar.forget()
    decoded = of_phase(trace, DECODE)
    assert isinstance(decoded, Trace)
    ends = np.cumsum(decoded.sequence_lengths)[:-1]
    steps = [step for step in np.split(decoded.topk_ids, ends) if len(step) == requests]
    reads = np.array([_reads(step[:, layer]) for step in steps for layer in range(step.shape[1])])
    busiest, mean = float(reads.max(axis=1).mean()), float(reads.mean())
    return {"busiest": busiest, "mean": mean, "ratio": busiest / mean}


def _reads(topk_ids: Sequence[Any]) -> list[int]:
    """Experts of each of two ranks with a token, of 16 in order."""
    used = np.unique(topk_ids)
    return [int((used < 8).sum()), int((used >= 8).sum())]
