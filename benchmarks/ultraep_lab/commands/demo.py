"""`ultraep-serve demo`: what balancing does, on this machine, in less than five minutes."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console

from ultraep_lab.arguments import prepare_outputs
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import PrefillOptions, PromptTokens
from ultraep_lab.demo.balanced_server import (
    BalancedServer,
    check_tokens,
    expert_parallel_flags,
    installed_engine,
    measure_server,
    mixed_prompts,
)
from ultraep_lab.demo.models import make_model, served_type
from ultraep_lab.demo.report import demo_report, demo_view
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_lab.outputs import write_json
from ultraep_lab.progress import Progress
from ultraep_lab.words import Seconds
from ultraep_serve.system.settings import Settings
from ultraep_serve.types import Policy

_CONTEXT = 16384
_CHECKED_PROMPTS, _LONGEST_CHECKED = 64, 768  # tokens: three times min_batch_tokens
_POLICIES = (Policy.OFF, Policy.QUOTA, Policy.IDEAL)
# compiling takes a minute, and filling half of the memory with an empty cache a quarter of one
_QUICK_START = ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29)]
_OUTPUTS = {"vllm": "demo.json", "sglang": "demo-sglang.json"}
_FEWEST_ROUNDS = 3
_PROBE_TOKENS = 2048
_GROWTH = 1.25  # a prompt of twice the length takes 2**_GROWTH times as long
_ALL_SECONDS, _MEASURING_SECONDS = 300.0, 90.0
# Guesses for the time left, before anything is known.
_MODEL_SECONDS, _START_SECONDS, _CHECK_SECONDS = 20.0, 60.0, 60.0


class DemoFlags(Settings):
    """What to measure, and where results go."""

    results: Path = Field(
        default=Path("results"),
        description="directory for all files",
        json_schema_extra={"metavar": "DIR"},
    )
    prompt_tokens: PromptTokens = (2048, 4096, 8192)
    repeats: int = Field(default=5, ge=1, description="rounds per length")
    seconds: Seconds | None = Field(
        default=None,
        description="for measuring (default: 90, or what is left of five minutes in all); where "
        "they are too few, the demo takes fewer rounds, or leaves out the longest prompts, and "
        "says so",
        json_schema_extra={"metavar": "SECONDS"},
    )
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="type of the numbers that are served (default: bfloat16, or float32 where this "
        "CPU emulates bfloat16)",
    )
    mode: Literal["tensor", "data"] = Field(
        default="tensor", description="parallelism of what is not an expert"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``DemoFlags``."""
    parser.description = (
        "Make a small Mixture-of-Experts model with skewed routing, serve it with the installed "
        "engine on two expert-parallel ranks, measure time to first token under every policy, and "
        "check that greedy tokens stay the same. No downloads."
    )
    DemoFlags.add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make, serve, measure, check, report. Raises UltraEPError with what to do."""
    flags, engine = DemoFlags.from_flags(arguments), installed_engine()
    output = flags.results / _OUTPUTS[engine]
    prepare_outputs(output)
    dtype = flags.dtype or served_type()
    anew = 0.0 if dtype == "float32" else _START_SECONDS  # the check is in float32
    progress = Progress()
    after = anew + _CHECK_SECONDS
    left = _START_SECONDS + (flags.seconds or _MEASURING_SECONDS) + after
    path = flags.results / "models" / "demo"
    if not (path / "model.safetensors").exists():
        what = "making a model whose router favours few experts"
        progress.say(what, _MODEL_SECONDS + left, always=True)
        make_model(path, ModelSpec())

    def server(numbers: str, left: float, *more: str) -> BalancedServer:
        given = [*expert_parallel_flags(flags.mode, numbers, _CONTEXT, engine), *more]
        given += _QUICK_START if engine == "vllm" else []
        log, until = flags.results / f"demo-{numbers}.log", progress.seconds + left
        what = f"starting {engine} in {numbers} on two ranks ({flags.mode} parallel)"
        progress.say(what, left, always=True)
        wait = _waiting(progress, what, until)
        return BalancedServer(path, given, log, engine=engine, on_wait=wait)

    with server(dtype, left, "--allow-ideal") as running:
        wanted = PrefillOptions(
            prompt_tokens=flags.prompt_tokens, policies=_POLICIES, repeats=flags.repeats, warmup=1
        )
        probed = _probed(running, progress, left - _START_SECONDS)
        unused = _ALL_SECONDS - progress.seconds - after
        options = affordable(wanted, probed, flags.seconds or min(_MEASURING_SECONDS, unused))
        bench = measure_server(
            running, options, "ultraep-serve demo", progress=progress, seconds_after=after
        )
        checked = _checked(running, progress) if dtype == "float32" else None
    if checked is None:
        with server("float32", after) as running:
            checked = _checked(running, progress)
    progress.end()
    report = demo_report(bench, checked, dtype, _notes(wanted, options, dtype, flags.dtype))
    write_json(output, report)
    console = Console()
    console.print(demo_view(report))
    console.print(f"Written to {output}; the server's log is beside it.")
    return 0


def _waiting(progress: Progress, what: str, until: float) -> Callable[[], None]:
    return lambda: progress.say(what, until - progress.seconds)


def _probed(running: BalancedServer, progress: Progress, left: float) -> float:
    """Seconds until the first token of a prompt of ``_PROBE_TOKENS``, by the second of two."""
    with Server(running.url) as server:
        progress.say("asking the first prompts", left, always=True)
        first, second = (sample_text(DOMAINS[0], _PROBE_TOKENS, seed) for seed in (1, 2))
        server.first_token(first)
        return server.first_token(second).seconds


def affordable(wanted: PrefillOptions, probed: float, seconds: float) -> PrefillOptions:
    """As much of ``wanted`` as takes ``seconds``; a prompt of 2,048 tokens takes ``probed``.

    First rounds are given up, down to three, then the longest prompts, but never all of them.
    """
    lengths, repeats = list(wanted.prompt_tokens), wanted.repeats
    while _cost(lengths, repeats + wanted.warmup, probed) > seconds:
        if repeats > _FEWEST_ROUNDS:
            repeats -= 1
        elif len(lengths) > 1:
            lengths.remove(max(lengths))
        else:
            break
    return wanted.model_copy(update={"prompt_tokens": tuple(lengths), "repeats": repeats})


def _cost(lengths: list[int], rounds: int, probed: float) -> float:
    of_2048 = sum(float((length / _PROBE_TOKENS) ** _GROWTH) for length in lengths)
    return len(_POLICIES) * rounds * probed * of_2048


def _checked(running: BalancedServer, progress: Progress) -> dict[str, object]:
    what = f"comparing the greedy tokens of {_CHECKED_PROMPTS} prompts"
    progress.say(what, _CHECK_SECONDS, always=True)
    prompts = mixed_prompts(_CHECKED_PROMPTS, _LONGEST_CHECKED)
    return check_tokens(running, prompts).to_json("float32")


def _notes(
    wanted: PrefillOptions, measured: PrefillOptions, dtype: str, given: str | None
) -> list[str]:
    """What was chosen so that the demo ends in time."""
    notes = []
    if dtype == "float32" and given is None:
        notes.append("float32, because this CPU has no instructions for bfloat16")
    if measured.repeats < wanted.repeats:
        notes.append(f"{measured.repeats} rounds instead of {wanted.repeats}, to end in time")
    if left_out := set(wanted.prompt_tokens) - set(measured.prompt_tokens):
        lengths = " and ".join(map(str, sorted(left_out)))
        notes.append(f"prompts of {lengths} tokens were left out, to end in time")
    return notes
