"""One model family on one engine, two ranks on this machine's CPU: a program of its own.

    python -m benchmarks.model_families.run ENGINE FAMILY MODEL OUT [--stock RANKS]

starts the engine in this process (vLLM's ``LLM``, SGLang's ``Engine``) on a checkpoint of
``make_family``, asks the same prompts with balancing on and off, and writes to OUT what came of
it. With ``--stock`` the engine runs without any of us, and OUT has its answers.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.model_families.checkpoints import FAMILIES, Family
from tests.support.serving_checks import MOVING_ALWAYS_PAYS
from tests.support.ways_to_start import SGLANG, VLLM, balanced_layers, run_path_of
from ultraep_lab.bench.greedy_tokens import LIKELIEST, Generation, compare_tokens
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_serve.sidecar.proof import self_check_of, verification_of
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.types import Policy

MIN_BATCH_TOKENS = 64  # below every prompt, above every batch of decodes
TOKENS = 16
# One at a time, so that each is a batch of its own, the same in every run.
PROMPTS = [sample_text(DOMAINS[i % len(DOMAINS)], 100 + 15 * i, seed=i) for i in range(14)]


class Answer(NamedTuple):
    """What an engine said to one prompt."""

    made: Generation
    logprobs: list[float]  # of every prompt token but the first


Ask = Callable[[], list[Answer]]


def settings(family: Family) -> dict[str, Any]:
    """How balancing is configured for ``family``."""
    return {
        "costs": MOVING_ALWAYS_PAYS.to_json(),
        "min_batch_tokens": MIN_BATCH_TOKENS,
        "self_check": "full",
        "slots": family.num_hot,
        "verify_every": 1,
    }


def vllm_asker(family: Family, model: str, stock: int) -> Ask:
    """``LLM``, and what asks it all prompts."""
    from vllm import LLM, SamplingParams

    own = {"dtype": family.dtype_on("vllm"), **family.flags}
    alone = {"tensor_parallel_size": stock, "enable_expert_parallel": False}
    balancing = {"additional_config": {"ultraep": settings(family)}}
    engine = LLM(model, **{**VLLM, **own, **(alone if stock else balancing)})
    greedy = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=LIKELIEST
    )

    def answer(prompt: str) -> Answer:
        (done,) = engine.generate(prompt, greedy, use_tqdm=False)
        chosen = zip(done.prompt_token_ids[1:], done.prompt_logprobs[1:], strict=True)
        logprobs = [position[token].logprob for token, position in chosen]
        output = done.outputs[0]
        best = [{str(id): of.logprob for id, of in each.items()} for each in output.logprobs]
        return Answer(Generation([*map(str, output.token_ids)], best), logprobs)

    return lambda: [answer(prompt) for prompt in PROMPTS]


def sglang_asker(family: Family, model: str, stock: int) -> Ask:
    """``Engine``, and what asks it all prompts."""
    import sglang

    own = {"dtype": family.dtype_on("sglang"), "log_level": "warning", **family.sglang_flags}
    alone = {"tp_size": stock, "ep_size": 1} if stock else {}
    engine = sglang.Engine(model_path=model, **{**SGLANG, **own, **alone})
    greedy = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

    def answer(prompt: str) -> Answer:
        done = engine.generate(
            prompt, greedy, return_logprob=True, logprob_start_len=0, top_logprobs_num=LIKELIEST
        )
        found = done["meta_info"]
        logprobs = [entry[0] for entry in found["input_token_logprobs"][1:]]
        best = [{str(id): value for value, id, _ in each} for each in found["output_top_logprobs"]]
        return Answer(Generation([*map(str, done["output_ids"])], best), logprobs)

    return lambda: [answer(prompt) for prompt in PROMPTS]


def measure(ask: Ask) -> dict[str, Any]:
    """Answers with balancing on and off compared, and what the rings say of the former.

    ``control`` compares off with off: what two runs differ in anyway.
    """
    run_path, on = run_path_of(os.getpid()), ask()
    layers = balanced_layers(run_path)
    header = RingReader(run_path / "ring-0").header()
    with ControlPage.open(run_path) as page:
        page.set_policy(Policy.OFF)
    off = ask()
    return {
        "layers": layers,
        "registered_layers": header.num_layers,
        **proof(run_path),
        "quota": difference(on, off),
        "control": difference(ask(), off),
        "answers": off,
    }


def proof(run_path: Path) -> dict[str, Any]:
    """The full self-check at start, and the samples of every layer of every batch."""
    headers = [RingReader(run_path / f"ring-{rank}").header() for rank in range(2)]
    found = self_check_of(headers)
    samples = verification_of(headers, is_off=False)
    return {
        "self_check": {
            "result": found.result,
            "seconds": found.seconds,
            "checks": {check.name: check.detail for check in found.checks},
        },
        "verification": {
            "layers": samples.layers,
            "failures": samples.failures,
            "by_check": {name: count.layers for name, count in samples.by_check.items()},
        },
    }


def difference(one: list[Answer], other: list[Answer]) -> dict[str, float]:
    """In how many prompts the tokens are alike, and how far log-probabilities are apart at most."""
    compared = compare_tokens([answer.made for answer in one], [answer.made for answer in other])
    apart = [np.abs(np.subtract(a.logprobs, b.logprobs)) for a, b in zip(one, other, strict=True)]
    return {
        "prompts": compared.prompts,
        "same_tokens": compared.same,
        "ties": compared.ties,
        "logprobs": max(compared.max_logprob_difference, float(np.concatenate(apart).max())),
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("engine", "family", "model", "out"):
        parser.add_argument(name)
    parser.add_argument("--stock", type=int, default=0, metavar="RANKS")
    given = parser.parse_args()
    asker = {"vllm": vllm_asker, "sglang": sglang_asker}[given.engine]
    ask = asker(FAMILIES[given.family], given.model, given.stock)
    found = {"answers": ask()} if given.stock else measure(ask)
    Path(given.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
