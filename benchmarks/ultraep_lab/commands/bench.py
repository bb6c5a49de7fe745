"""`ultraep-serve bench prefill`: time to first token of a running server, policy by policy."""

import argparse
import functools
import shlex
import sys
from pathlib import Path

from pydantic import Field

from ultraep_lab.arguments import JsonFile, ServerFlags, control_token, prepare_outputs, show
from ultraep_lab.bench.endpoint import understood
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import PrefillOptions
from ultraep_lab.bench.prefill_report import measure_with_progress, prefill_document, prefill_view
from ultraep_lab.bench.prompts import CommonWords, FileText, PromptSource
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.demo.text import DOMAINS, domain_words, sample_text
from ultraep_lab.progress import Progress
from ultraep_lab.words import Seconds
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_object


class PrefillFlags(ServerFlags):
    """What `bench prefill` takes beside ``PrefillOptions``."""

    model: str | None = Field(
        default=None, description="the served model's name (default: the server's first)"
    )
    timeout: Seconds = Field(default=600.0, description="limit for one answer")
    json_file: JsonFile = None
    text_file: Path | None = Field(
        default=None,
        description="take prompts from this text (default: common words in random order)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be measured, and its flags."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    prefill = kinds.add_parser("prefill", help="time to first token under each policy")
    prefill.description = (
        "Measure the time to first token of a running server under each policy. "
        "Policies take turns, no prompt is ever repeated, and the policy in force before is "
        "restored at the end."
    )
    PrefillFlags.add_flags(prefill)
    PrefillOptions.add_flags(prefill)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table, write the JSON. Raises UltraEPError with what to do."""
    options, flags = PrefillOptions.from_flags(arguments), PrefillFlags.from_flags(arguments)
    token = control_token(flags)
    prepare_outputs(flags.json_file)
    with (
        Server(flags.url, flags.model, flags.timeout) as server,
        Sidecar(flags.sidecar, token, flags.timeout) as sidecar,
    ):
        source = _source(flags.text_file, server.root)
        result = measure_with_progress(server, sidecar, source, options, Progress())
        with understood(sidecar.url):
            command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
            document = prefill_document(result, server, command)
            view = prefill_view(document)
    show(document, view, flags.json_file)
    return 0


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
