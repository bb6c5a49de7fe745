"""`ultraep-serve bench`: latency of a running server, policy by policy.

`bench prefill` sends one prompt at a time, `bench load` as many as a request rate asks for.
"""

import argparse
import functools
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ultraep_lab.bench.aiperf import AIPerf
from ultraep_lab.bench.engine import Server, ServerWithoutEP
from ultraep_lab.bench.load import LoadOptions, LoadRun, LoadWindow, measure_load
from ultraep_lab.bench.load_report import (
    load_document,
    load_picture,
    load_progress,
    load_view,
)
from ultraep_lab.bench.prefill import Policies, PrefillOptions, Servers
from ultraep_lab.bench.prefill_report import (
    measure_with_progress,
    prefill_document,
    prefill_view,
)
from ultraep_lab.bench.prompts import CommonWords, FileText, PromptSource
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.text import DOMAINS, domain_words, sample_text
from ultraep_lab.pictures import require_matplotlib
from ultraep_serve.cli.arguments import (
    JsonFile,
    ServerFlags,
    control_token,
    prepare_outputs,
    show,
    write_pictures,
)
from ultraep_serve.errors import ConfigError, understood
from ultraep_serve.system.files import read_object, write_json
from ultraep_serve.system.settings import Directory, Seconds, Settings, Shown, Url
from ultraep_serve.types import Policy

__all__ = ["LoadFiles", "add_arguments", "load_results", "prepare_load_outputs", "run"]

TEXTS = "take prompts from this text (default: common words in random order)"


class MeasuredServer(ServerFlags):
    """Which server is measured, and where its figures go."""

    model: str | None = Field(
        default=None, description="the served model's name (default: the server's first)"
    )
    timeout: Seconds = Field(default=600.0, description="limit for one answer")
    json_file: JsonFile = None


class PrefillFlags(MeasuredServer):
    """What `bench prefill` takes beside ``PrefillOptions``."""

    text_file: Path | None = Field(default=None, description=TEXTS)
    without_ep: Url | None = Field(
        default=None,
        description="a second server, which takes its turn in every round: the same engine and "
        "model on the same cores or GPUs, without expert parallelism and balancing",
    )


class LoadFiles(Settings):
    """The load generator, and files that it makes; `bench load` and our own benchmark share it."""

    aiperf: Annotated[str, Shown("PATH")] = Field(
        default="aiperf", description="AIPerf's executable"
    )
    raw: Directory | None = Field(
        default=None,
        description="keep AIPerf's own files in DIR, a folder per window",
    )
    plots: Directory | None = Field(
        default=None,
        description="draw the curves into DIR, as load.svg or by the name of the JSON file",
    )


class LoadFlags(MeasuredServer):
    """What `bench load` takes beside ``LoadOptions`` and ``LoadFiles``."""

    policies: Policies = (Policy.OFF, Policy.QUOTA)
    text_file: tuple[Path, ...] = Field(
        default=(),
        description=f"{TEXTS}; given again, every window goes from one text to the next",
        json_schema_extra={"metavar": "FILE", "action": "append"},
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be measured, and the flags of each."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    prefill = kinds.add_parser("prefill", help="time to first token under each policy")
    prefill.description = (
        "Measure the time to first token of a running server under each policy. "
        "Policies take turns, no prompt is ever repeated, and the policy in force before is "
        "restored at the end."
    )
    load = kinds.add_parser("load", help="latency against request rate under each policy")
    load.description = (
        "Measure a running server under a ladder of request rates, under each policy, with AIPerf "
        "as load generator. Requests arrive open loop; every policy gets the same "
        "lengths, texts and arrivals, in windows that alternate. The policy in force before is "
        "restored at the end."
    )
    for kind, measure, schemas in (
        (prefill, _measure_prefill, (PrefillFlags, PrefillOptions)),
        (load, _measure_load, (LoadFlags, LoadOptions, LoadFiles)),
    ):
        for schema in schemas:
            schema.add_flags(kind)
        kind.set_defaults(measure=measure)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Raises UltraEPError with what to do."""
    arguments.measure(arguments)
    return 0


def _measure_prefill(arguments: argparse.Namespace) -> None:
    options, flags = PrefillOptions.from_flags(arguments), PrefillFlags.from_flags(arguments)
    token = control_token(flags)
    prepare_outputs(flags.json_file)
    with ExitStack() as opened:
        server = opened.enter_context(Server(flags.url, flags.model, flags.timeout))
        sidecar = opened.enter_context(Sidecar(flags.sidecar, token, flags.timeout))
        plain = None
        if flags.without_ep is not None:
            plain = ServerWithoutEP(flags.without_ep, timeout_seconds=flags.timeout)
            opened.enter_context(plain)
        servers = Servers(server, sidecar, plain)
        source = _source(flags.text_file, server.root)
        result = measure_with_progress(servers, source, options)
        with understood(sidecar.url):
            document = prefill_document(result, servers, _command(sys.argv))
            view = prefill_view(document)
    show(document, view, flags.json_file)


def _measure_load(arguments: argparse.Namespace) -> None:
    options, flags = LoadOptions.from_flags(arguments), LoadFlags.from_flags(arguments)
    files, token = LoadFiles.from_flags(arguments), control_token(flags)
    prepare_load_outputs(files, flags.json_file)
    aiperf = AIPerf(files.aiperf)
    with (
        Server(flags.url, flags.model, flags.timeout) as server,
        Sidecar(flags.sidecar, token, flags.timeout) as sidecar,
    ):
        sources = [_source(text, server.root) for text in flags.text_file or (None,)]
        running = LoadRun(aiperf, sources, options, flags.timeout, files.raw)
        about = {"url": server.url, "model": server.model, "command": _command(sys.argv)}
        contenders = [policy.value for policy in flags.policies]
        with load_results(running, contenders, about, flags.json_file, files.plots):
            measure_load(running, Servers(server, sidecar), flags.policies)


def prepare_load_outputs(files: LoadFiles, json_file: Path | None) -> None:
    """Before the work, find out whether results can be written. Raises UltraEPError."""
    prepare_outputs(json_file)
    if files.plots is not None:
        require_matplotlib()
        prepare_outputs(files.plots / _picture_name(json_file))
    if files.raw is not None:
        prepare_outputs(files.raw / "console.txt")


@contextmanager
def load_results(
    running: LoadRun,
    contenders: Sequence[str],
    about: Mapping[str, Any],
    json_file: Path | None,
    plots: Path | None,
) -> Iterator[None]:
    """Shows progress while inside measures; then the results, also after an error or Ctrl-C.

    A file ``json_file`` is written anew after every window.
    """
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def document() -> dict[str, Any]:
        return load_document(running, contenders, {**about, "started": started})

    def save(_: LoadWindow) -> None:
        if json_file is not None and json_file != Path("-"):
            write_json(json_file, document())

    running.on_window = save
    try:
        with load_progress(running, len(contenders)):
            yield
    finally:
        if running.windows:
            made = document()
            show(made, load_view(made), json_file)
            if plots is not None:
                write_pictures(plots, {_picture_name(json_file): load_picture(made)})


def _picture_name(json_file: Path | None) -> str:
    return f"{json_file.stem}.svg" if json_file and json_file != Path("-") else "load.svg"


def _source(text_file: Path | None, model_root: str) -> PromptSource:
    """The operator's text, or words that the model's tokenizer knows."""
    if text_file is not None:
        return FileText(text_file)
    return _demo_text(Path(model_root) / "tokenizer.json") or CommonWords()


def _demo_text(tokenizer_file: Path) -> PromptSource | None:
    """Text for a model of ``ultraep_lab.demo``, which knows no English; None for others."""
    try:
        model = read_object(tokenizer_file, "the tokenizer").get("model")
    except ConfigError:
        return None  # no local file of a fast tokenizer, so not one of the demo's
    if not isinstance(model, dict) or not isinstance(words := model.get("vocab"), dict):
        return None
    known = (domain for domain in DOMAINS if domain_words(domain)[0] in words)
    return next((functools.partial(sample_text, domain) for domain in known), None)


def _command(words: Sequence[str]) -> str:
    """The command line to publish beside the figures, without the token."""
    given = list(words)
    for i, word in enumerate(given):
        if word.startswith("--token="):
            given[i] = "--token=..."
        elif i > 0 and given[i - 1] == "--token":
            given[i] = "..."
    return shlex.join([Path(given[0]).name, *given[1:]])
