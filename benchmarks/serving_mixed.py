"""Time between tokens while prompts of others arrive: prefill and decode share batches."""

import argparse
from contextlib import closing
from statistics import median
from typing import Any

from served import model, serve, serve_without_ep

from ultraep_lab.bench.aiperf import AIPerf, Request
from ultraep_lab.bench.engine import Server, ServerWithoutEP
from ultraep_lab.bench.prefill import WITHOUT_EP, Servers, balanced_orders, ratios_json
from ultraep_lab.bench.prompts import Openings
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.types import Policy

STREAMS, STREAM_TOKENS, STREAM_PROMPT = 4, 512, 64
PROMPTS, PROMPT_TOKENS = 16, 2048
FIRST_SECONDS, EVERY_SECONDS = 0.5, 0.5  # when prompts arrive
FIGURES = ("pause_mean", "pause_p50", "pause_p90", "pause_p99")
TIMEOUT_SECONDS = 300.0


def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Some streams decode while long prompts arrive, contenders in turn, a window each.

    The prompts ask for one token, so all times between tokens are the streams'. The first round
    is not counted.
    """
    path, openings, rounds = model(options.model), Openings(), []
    aiperf = AIPerf(options.aiperf)
    with (
        serve_without_ep(options, path, "bfloat16") as plain,
        serve(options, path, "bfloat16", "--allow-ideal") as running,
        closing(Server(running.url)) as balanced,
        closing(ServerWithoutEP(plain.url)) as without_ep,
        closing(Sidecar(running.sidecar_url, running.token)) as sidecar,
    ):
        servers = Servers(balanced, sidecar, without_ep)
        variants = servers.variants((Policy.OFF, Policy.QUOTA, Policy.IDEAL))
        orders = balanced_orders(variants)
        for place in range(1 + options.repeats):
            found = {}
            for variant in orders[place % len(orders)]:
                server = servers.ready_for(variant)
                figures = aiperf.measure(
                    server.url, server.model, schedule(openings, place), 1.0, TIMEOUT_SECONDS
                ).to_json()
                found[variant] = {name: figures[f"{name}_seconds"] for name in FIGURES}
                print(place, variant, found[variant], flush=True)
            rounds.append(found)
    counted = rounds[1:]
    return {
        "model": options.model,
        "mode": options.mode,
        "load_generator": f"aiperf {aiperf.version}",
        "streams": {"number": STREAMS, "output_tokens": STREAM_TOKENS},
        "prompts": {"number": PROMPTS, "tokens": PROMPT_TOKENS, "every_seconds": EVERY_SECONDS},
        "seconds": {
            variant: {name: median(each[variant][name] for each in counted) for name in FIGURES}
            for variant in variants
        },
        "ratios": {
            f"quota_over_{base}": {
                name: ratios_json([each["quota"][name] / each[base][name] for each in counted])
                for name in FIGURES
            }
            for base in ("off", "ideal", WITHOUT_EP)
        },
        "rounds": counted,
    }


def schedule(openings: Openings, seed: int) -> list[Request]:
    """The streams at once, then a long prompt at a time; texts of one round are the same."""
    streams = [
        Request(0.0, _prompt(openings, STREAM_PROMPT, seed * STREAMS + i), STREAM_TOKENS)
        for i in range(STREAMS)
    ]
    prompts = [
        Request(
            FIRST_SECONDS + i * EVERY_SECONDS,
            _prompt(openings, PROMPT_TOKENS, seed * PROMPTS + i),
            1,
        )
        for i in range(PROMPTS)
    ]
    return [*streams, *prompts]


def _prompt(openings: Openings, tokens: int, seed: int) -> str:
    text = sample_text(DOMAINS[0], tokens, seed)
    return f"{openings.next(text)} {text}"
