"""`ultraep-serve bench`: latency of a running server, policy by policy.

`bench prefill` sends one prompt at a time, `bench load` as many as a request rate asks for.
"""

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ultraep_serve.cli.arguments import (
    add_json_argument,
    add_server_arguments,
    built,
    control_token,
    names,
    numbers,
    prepare_outputs,
    seconds,
    show,
    write_pictures,
)
from ultraep_serve.config import parse_policy
from ultraep_serve.errors import ConfigError, understood
from ultraep_serve.lab.bench.aiperf import AIPerf
from ultraep_serve.lab.bench.engine import Server, ServerWithoutEP
from ultraep_serve.lab.bench.load import LoadOptions, LoadRun, Window, measure_load
from ultraep_serve.lab.bench.load_report import (
    load_document,
    load_picture,
    load_progress,
    load_view,
)
from ultraep_serve.lab.bench.prefill import PrefillOptions, Servers
from ultraep_serve.lab.bench.prefill_report import (
    measure_with_progress,
    prefill_document,
    prefill_view,
)
from ultraep_serve.lab.bench.prompts import CommonWords, FileText, PromptSource
from ultraep_serve.lab.bench.sidecar import Sidecar
from ultraep_serve.lab.demo.text import DOMAINS, domain_words, sample_text
from ultraep_serve.lab.pictures import require_matplotlib
from ultraep_serve.system.files import write_json

__all__ = ["add_arguments", "add_load_arguments", "load_results", "prepare_load_outputs", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be measured, and the flags of each."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    _add_prefill(kinds.add_parser("prefill", help="time to first token under each policy"))
    _add_load(kinds.add_parser("load", help="latency against request rate under each policy"))


def _add_prefill(prefill: argparse.ArgumentParser) -> None:
    prefill.description = (
        "Measure the time to first token of a running server under each policy. "
        "Policies take turns, no prompt is ever repeated, and the policy in force before is "
        "restored at the end."
    )
    _add_common(prefill)
    text_file = "take prompts from this text (default: common words in random order)"
    prefill.add_argument("--text-file", type=Path, metavar="FILE", help=text_file)
    prefill.add_argument(
        "--without-ep", metavar="URL",
        help="a second server, which takes its turn in every round: the same engine and model on "
        "the same cores or GPUs, without expert parallelism and balancing",
    )  # fmt: skip
    prefill.add_argument(
        "--prompt-tokens", type=numbers(), metavar="N,...", default="2048,4096,8192",
        help="prompt lengths",
    )  # fmt: skip
    for flag, default, text in (
        ("--repeats", 7, "rounds per length"),
        ("--warmup", 2, "requests per length and policy that are not measured"),
        ("--seed", 0, "seed of the texts and of the order of policies"),
    ):
        prefill.add_argument(flag, type=int, metavar="N", default=default, help=text)
    add_json_argument(prefill)
    prefill.set_defaults(measure=_measure_prefill)


def _add_load(load: argparse.ArgumentParser) -> None:
    load.description = (
        "Measure a running server under a ladder of request rates, under each policy, with AIPerf "
        "as load generator. Requests arrive open loop; every policy gets the same "
        "lengths, texts and arrivals, in windows that alternate. The policy in force before is "
        "restored at the end."
    )
    _add_common(load)
    load.add_argument(
        "--text-file", type=Path, metavar="FILE", action="append",
        help="take prompts from this text (default: common words in random order); given again, "
        "every window goes from one text to the next",
    )  # fmt: skip
    add_load_arguments(load)
    add_json_argument(load)
    load.set_defaults(measure=_measure_load)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--model", help="the served model's name (default: the server's first)")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=600.0, help="limit for one answer"
    )
    parser.add_argument(
        "--policies", type=names, metavar="NAME,...", default="off,quota",
        help="policies to compare; ideal needs a server started with --allow-ideal",
    )  # fmt: skip


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of traffic and output that `bench load` and our own benchmark share."""
    defaults = LoadOptions()
    parser.add_argument(
        "--rates", type=_rates, metavar="X,...", default=",".join(f"{r:g}" for r in defaults.rates),
        help="requests per second, growing",
    )  # fmt: skip
    for flag, text in (
        ("--requests", "requests per window"),
        ("--repeats", "windows per policy and rate"),
        ("--prompt-median", "tokens; prompt lengths are lognormal"),
        ("--prompt-p90", "tokens; nine of ten prompts are not longer"),
        ("--output-tokens", "tokens of every answer"),
        ("--warmup", "requests per policy that are not measured"),
        ("--seed", "seed of lengths, texts and arrivals"),
    ):
        default = getattr(defaults, flag[2:].replace("-", "_"))
        parser.add_argument(flag, type=int, metavar="N", default=default, help=text)
    parser.add_argument(
        "--burstiness", type=float, metavar="X", default=defaults.burstiness,
        help="of arrivals: 1 is Poisson, below it they come in bursts (shape of a gamma "
        "distribution)",
    )  # fmt: skip
    parser.add_argument(
        "--ttft-objective", type=seconds, metavar="SECONDS", default=defaults.ttft_objective,
        help="time to first token within which a request counts as good",
    )  # fmt: skip
    parser.add_argument("--aiperf", metavar="PATH", default="aiperf", help="AIPerf's executable")
    raw = "keep AIPerf's own files in DIR, a folder per window"
    parser.add_argument("--raw", type=Path, metavar="DIR", help=raw)
    plots = "draw the curves into DIR, as load.svg or by the name of the JSON file"
    parser.add_argument("--plots", type=Path, metavar="DIR", help=plots)


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, names(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text} must be numbers above 0, separated by commas"
        ) from None


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Raises UltraEPError with what to do."""
    arguments.policies = tuple(map(parse_policy, arguments.policies))
    arguments.measure(arguments)
    return 0


def _measure_prefill(arguments: argparse.Namespace) -> None:
    options, token = built(PrefillOptions, arguments), control_token(arguments)
    prepare_outputs(arguments.json)
    with ExitStack() as opened:
        server = opened.enter_context(Server(arguments.url, arguments.model, arguments.timeout))
        sidecar = opened.enter_context(Sidecar(arguments.sidecar, token, arguments.timeout))
        plain = None
        if arguments.without_ep is not None:
            plain = ServerWithoutEP(arguments.without_ep, timeout_seconds=arguments.timeout)
            opened.enter_context(plain)
        servers = Servers(server, sidecar, plain)
        source = _source(arguments.text_file, server.root)
        result = measure_with_progress(servers, source, options)
        with understood(sidecar.url):
            document = prefill_document(result, servers, _command(sys.argv))
            view = prefill_view(document)
    show(document, view, arguments.json)


def _measure_load(arguments: argparse.Namespace) -> None:
    options, token = built(LoadOptions, arguments), control_token(arguments)
    policies = arguments.policies
    if not policies or len(set(policies)) < len(policies):
        raise ConfigError("--policies must name each policy at most once, and at least one")
    prepare_load_outputs(arguments)
    aiperf = AIPerf(arguments.aiperf)
    with (
        Server(arguments.url, arguments.model, arguments.timeout) as server,
        Sidecar(arguments.sidecar, token, arguments.timeout) as sidecar,
    ):
        texts = arguments.text_file or [None]
        sources = [_source(text, server.root) for text in texts]
        running = LoadRun(aiperf, sources, options, arguments.timeout, arguments.raw)
        about = {"url": server.url, "model": server.model, "command": _command(sys.argv)}
        with load_results(arguments, running, [policy.value for policy in policies], about):
            measure_load(running, Servers(server, sidecar), policies)


def prepare_load_outputs(arguments: argparse.Namespace) -> None:
    """Before the work, find out whether results can be written. Raises UltraEPError."""
    prepare_outputs(arguments.json)
    if arguments.plots is not None:
        require_matplotlib()
        prepare_outputs(arguments.plots / _picture_name(arguments.json))
    if arguments.raw is not None:
        prepare_outputs(arguments.raw / "console.txt")


@contextmanager
def load_results(
    arguments: argparse.Namespace,
    running: LoadRun,
    contenders: Sequence[str],
    about: Mapping[str, Any],
) -> Iterator[None]:
    """Shows progress while inside measures; then the results, also after an error or Ctrl-C.

    A file that --json names is written anew after every window.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def document() -> dict[str, Any]:
        return load_document(running, contenders, {**about, "started": started})

    def save(_: Window) -> None:
        if arguments.json not in (None, Path("-")):
            write_json(arguments.json, document())

    running.on_window = save
    try:
        with load_progress(running, len(contenders)):
            yield
    finally:
        if running.windows:
            made = document()
            show(made, load_view(made), arguments.json)
            if arguments.plots is not None:
                name = _picture_name(arguments.json)
                write_pictures(arguments.plots, {name: load_picture(made)})


def _picture_name(json_file: Path | None) -> str:
    return "load.svg" if json_file in (None, Path("-")) else f"{json_file.stem}.svg"


def _source(text_file: Path | None, model_root: str) -> PromptSource:
    """The operator's text, or words that the model's tokenizer knows."""
    if text_file is not None:
        return FileText(text_file)
    return _demo_text(Path(model_root) / "tokenizer.json") or CommonWords()


def _demo_text(tokenizer_file: Path) -> PromptSource | None:
    """Text for a model of ``ultraep_serve.lab.demo``, which knows no English; None for others."""
    try:
        model = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError):
        return None  # no local file of a fast tokenizer, so not one of the demo's
    if model.get("type") == "WordLevel":
        for domain in DOMAINS:
            if domain_words(domain)[0] in model["vocab"]:
                return functools.partial(sample_text, domain)
    return None


def _command(words: Sequence[str]) -> str:
    """The command line to publish beside the figures, without the token."""
    given = list(words)
    for i, word in enumerate(given):
        if word.startswith("--token="):
            given[i] = "--token=..."
        elif i > 0 and given[i - 1] == "--token":
            given[i] = "..."
    return shlex.join([Path(given[0]).name, *given[1:]])
