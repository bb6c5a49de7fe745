"""Outputs of commands in the pages, from the JSON of benchmarks/tutorial.py.

    python -m docs.generate.samples

An output is the block of code behind ``<!-- sample NAME -->``.
"""

import json
import re

from docs.generate.figures import read_document
from docs.generate.reference import DOCS

__all__ = ["PAGES", "with_samples"]

PAGES = (DOCS / "tutorial.md", DOCS / "http.md", DOCS.parent / "README.md")
_SAMPLE = re.compile(r"(<!-- sample ([\w-]+) -->\n```\n).*?(```)", re.DOTALL)


def with_samples(page: str) -> str:
    """``page`` with its outputs as they were printed. Raises KeyError for one that was not."""
    samples = read_document("tutorial")["samples"]
    balance = json.loads(samples["balance"])
    answer = (*balance["imbalance"].values(), balance["batches"])
    lines = (json.dumps(part, separators=(",", ":")) for part in answer)
    samples["lines-of-balance"] = "\n".join(lines)
    return _SAMPLE.sub(lambda found: found[1] + samples[found[2]] + "\n" + found[3], page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_samples(path.read_text()))
