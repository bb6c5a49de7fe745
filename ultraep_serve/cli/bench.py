"""`ultraep-serve bench prefill`: time to first token of a running server, policy by policy."""

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep_serve.cli.arguments import (
    DEFAULT,
    add_token_arguments,
    control_token,
    listed,
    prompt_lengths,
    require_packages,
)
from ultraep_serve.config import parse_policy

if TYPE_CHECKING:
    from ultraep_serve.client.engine import Server
    from ultraep_serve.client.prefill import PrefillOptions, PrefillResult
    from ultraep_serve.client.prompts import PromptSource
    from ultraep_serve.client.sidecar import Sidecar

__all__ = ["add_parser", "measure_with_progress", "run"]

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the main parser's ``subparsers``."""
    bench = subparsers.add_parser("bench", help="measure a running server")
    kinds = bench.add_subparsers(dest="bench_kind", required=True, metavar="KIND")
    prefill = kinds.add_parser(
        "prefill",
        help="time to first token under each policy",
        description="Measure the time to first token of a running server under each policy. "
        "Prompts alternate between policies, none is ever repeated, and the policy in force "
        "before is restored.",
    )
    _add_server_arguments(prefill)
    _add_measuring_arguments(prefill)
    prefill.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Raises UltraEPError with what to do."""
    try:
        return _bench_prefill(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help=f"the engine's server ({DEFAULT})"
    )
    parser.add_argument(
        "--sidecar", default="http://127.0.0.1:8001", help=f"the sidecar ({DEFAULT})"
    )
    add_token_arguments(parser)
    parser.add_argument("--model", help="served model (default: the first)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help=f"seconds for one answer ({DEFAULT})"
    )


def _add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-tokens", default="2048,4096,8192", help=f"prompt lengths ({DEFAULT})"
    )
    parser.add_argument(
        "--policies",
        default="off,quota",
        help=f"policies to compare; ideal needs a server started with --allow-ideal ({DEFAULT})",
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help=f"measured rounds per length ({DEFAULT})"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        help=f"unmeasured requests per length and policy ({DEFAULT})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help=f"of the texts and the order ({DEFAULT})"
    )
    parser.add_argument(
        "--text-file", type=Path, help="text to take prompts from (default: random common words)"
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")


def _bench_prefill(arguments: argparse.Namespace) -> int:
    require_packages("httpx", "rich")
    from rich.console import Console

    from ultraep_serve.client.engine import Server
    from ultraep_serve.client.prefill_report import prefill_document, prefill_view
    from ultraep_serve.client.sidecar import Sidecar
    from ultraep_serve.files import prepare_output, write_json

    options, token = _options(arguments), control_token(arguments)
    if arguments.json is not None:
        prepare_output(arguments.json)
    with closing(Server(arguments.url, arguments.model, arguments.timeout)) as server:
        source = _source(arguments.text_file, server.root)
        with closing(Sidecar(arguments.sidecar, token, arguments.timeout)) as sidecar:
            result = measure_with_progress(server, sidecar, source, options)
        document = prefill_document(result, server.url, server.model, _command())
    if arguments.json is not None:
        write_json(arguments.json, document)
    Console().print(prefill_view(document))
    return 0


def measure_with_progress(
    server: "Server", sidecar: "Sidecar", source: "PromptSource", options: "PrefillOptions"
) -> "PrefillResult":
    """Measure behind a progress bar.

    It redraws between requests only: a thread of its own would take time from the server.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from ultraep_serve.client.prefill import measure_prefill

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=options.num_requests, completed=-1)

        def on_step(description: str) -> None:
            progress.update(task, advance=1, description=description, refresh=True)

        return measure_prefill(server, sidecar, source, options, on_step)


def _options(arguments: argparse.Namespace) -> "PrefillOptions":
    from ultraep_serve.client.prefill import PrefillOptions

    return PrefillOptions(
        prompt_tokens=prompt_lengths(arguments.prompt_tokens),
        policies=tuple(parse_policy(name) for name in listed(arguments.policies)),
        repeats=arguments.repeats,
        warmup=arguments.warmup,
        seed=arguments.seed,
    )


def _source(text_file: Path | None, model_root: str) -> "PromptSource":
    """The operator's text, or words that the model's tokenizer knows."""
    from ultraep_serve.client.prompts import CommonWords, FileText

    if text_file is not None:
        return FileText(text_file)
    return _made_up_text(Path(model_root) / "tokenizer.json") or CommonWords()


def _made_up_text(tokenizer_file: Path) -> "PromptSource | None":
    """Text for a model of ``ultraep_serve.demo``, which knows no English; None for others."""
    try:
        model = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, KeyError):
        return None  # no local file of a fast tokenizer: certainly not ours
    if model.get("type") != "WordLevel":
        return None
    from ultraep_serve.demo.text import DOMAINS, domain_words, sample_text

    for domain in DOMAINS:
        if domain_words(domain)[0] in model["vocab"]:
            return functools.partial(sample_text, domain)
    return None


def _command(words: Sequence[str] | None = None) -> str:
    """The command line to publish beside the figures, without the token."""
    given = list(sys.argv if words is None else words)
    for i, word in enumerate(given):
        if word.startswith("--token="):
            given[i] = "--token=..."
        elif i > 0 and given[i - 1] == "--token":
            given[i] = "..."
    return shlex.join([Path(given[0]).name, *given[1:]])
