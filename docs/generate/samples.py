"""Outputs of commands in the pages, from the JSON of benchmarks/tutorial.py.

    python -m docs.generate.samples

An output is the block of code behind ``<!-- sample NAME -->``.
"""

import contextlib
import io
import json
import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

from docs.generate.figures import printed, read_document
from docs.generate.reference import DOCS

__all__ = ["PAGES", "with_samples"]

_NAMES = "tutorial.md", "http.md", "commands/bench.md", "commands/replay.md", "../README.md"
PAGES = tuple(DOCS / name for name in _NAMES)
_SYNTHETIC = re.compile(r"^ultraep-serve (.*\bsynthetic\.npz\b.*)$", re.MULTILINE)
_VERDICT = re.compile(r"Turn it on|Leave it off|\d+ slots? (?:for all layers|per layer)")
_SAMPLE = re.compile(r"(<!-- sample ([\w-]+) -->\n```\n).*?(```)", re.DOTALL)


def with_samples(page: str) -> str:
    """``page`` with its outputs as they were printed. Raises KeyError for one that was not."""
    from ultraep_lab.bench.prefill_report import prefill_view

    samples = read_document("tutorial")["samples"]
    balance = json.loads(samples["balance"])
    answer = (*balance["imbalance"].values(), balance["batches"])
    lines = (json.dumps(part, separators=(",", ":")) for part in answer)
    samples["lines-of-balance"] = "\n".join(lines)
    samples["bench"] = "\n".join(printed(prefill_view(read_document("serving-ttft"))))
    if "<!-- sample verdict -->" in page:
        samples["verdict"] = _verdict(_SYNTHETIC.findall(page))
    return _SAMPLE.sub(lambda found: found[1] + samples[found[2]] + "\n" + found[3], page)


def _verdict(commands: list[str]) -> str:
    """What a page's commands about a made-up trace end with; they need no server."""
    from ultraep_serve.cli import main

    out, wide = io.StringIO(), patch.dict(os.environ, COLUMNS="200")
    with wide, tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        for command in commands:
            words = command.replace("synthetic.npz", str(Path(folder) / "synthetic.npz")).split()
            with contextlib.suppress(SystemExit):
                main(words)
    return "\n".join(line for line in out.getvalue().splitlines() if _VERDICT.match(line))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_samples(path.read_text()))
