"""`ultraep-serve bench prefill`: time to first token of a running server, policy by policy."""

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

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
)
from ultraep_serve.client.engine import Server, ServerWithoutEP
from ultraep_serve.client.prefill import PrefillOptions, Servers
from ultraep_serve.client.prefill_report import (
    measure_with_progress,
    prefill_document,
    prefill_view,
)
from ultraep_serve.client.prompts import CommonWords, FileText, PromptSource
from ultraep_serve.client.sidecar import Sidecar
from ultraep_serve.config import parse_policy
from ultraep_serve.demo.text import DOMAINS, domain_words, sample_text
from ultraep_serve.errors import understood

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be measured, and the flags of each."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    prefill = kinds.add_parser(
        "prefill",
        help="time to first token under each policy",
        description="Measure the time to first token of a running server under each policy. "
        "Policies take turns, no prompt is ever repeated, and the policy in force before is "
        "restored at the end.",
    )
    add_server_arguments(prefill)
    prefill.add_argument(
        "--without-ep", metavar="URL",
        help="a second server, which takes its turn in every round: the same engine and model on "
        "the same cores or GPUs, without expert parallelism and balancing",
    )  # fmt: skip
    prefill.add_argument("--model", help="the served model's name (default: the server's first)")
    prefill.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", default=600.0, help="limit for one answer"
    )
    prefill.add_argument(
        "--prompt-tokens", type=numbers(), metavar="N,...", default="2048,4096,8192",
        help="prompt lengths",
    )  # fmt: skip
    prefill.add_argument(
        "--policies", type=names, metavar="NAME,...", default="off,quota",
        help="policies to compare; ideal needs a server started with --allow-ideal",
    )  # fmt: skip
    for flag, default, text in (
        ("--repeats", 7, "rounds per length"),
        ("--warmup", 2, "requests per length and policy that are not measured"),
        ("--seed", 0, "seed of the texts and of the order of policies"),
    ):
        prefill.add_argument(flag, type=int, metavar="N", default=default, help=text)
    text_file = "take prompts from this text (default: common words in random order)"
    prefill.add_argument("--text-file", type=Path, metavar="FILE", help=text_file)
    add_json_argument(prefill)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Raises UltraEPError with what to do."""
    arguments.policies = tuple(map(parse_policy, arguments.policies))
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
    return 0


def _source(text_file: Path | None, model_root: str) -> PromptSource:
    """The operator's text, or words that the model's tokenizer knows."""
    if text_file is not None:
        return FileText(text_file)
    return _demo_text(Path(model_root) / "tokenizer.json") or CommonWords()


def _demo_text(tokenizer_file: Path) -> PromptSource | None:
    """Text for a model of ``ultraep_serve.demo``, which knows no English; None for others."""
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
