"""The table of docs/dev/decode.md, from the JSON of benchmarks/decode.py.

python -m docs.generate.decode
"""

import json
from pathlib import Path
from typing import Any

from docs.generate.reference import DOCS, table, with_table

__all__ = ["NAME", "PAGE", "decode"]

PAGE = DOCS / "dev" / "decode.md"
RESULT = DOCS.parent / "benchmarks" / "results" / "decode-experts.json"
NAME = "decode-experts"
_MODEL, _TRAFFIC = "deepseek-v3", "same"
_REDUNDANT = ("2", "half")  # experts per rank
_CHOICES = ("vllm", "fixed", "metro", "fewest")
_RANKS_OF_A_HOST = 8


def decode(result: Path = RESULT) -> str:
    """A row for each number of ranks and of tokens of DeepSeek-V3's sizes."""
    found = json.loads(result.read_text())
    read_seconds = found["models"][_MODEL]["read_seconds"]
    costs = found["exchange_seconds"]
    head = (
        "ranks", "tokens", "no redundant experts (mean rank)",
        "two more: vLLM, fixed, METRO, fewest", "half more: vLLM, fixed, METRO, fewest",
        "METRO saves against none, us: two more; half more",
        "against vLLM's choice, us: two more; half more", "exchange",
    )  # fmt: skip
    rows = []
    for row in found["rows"]:
        if (row["model"], row["traffic"]) != (_MODEL, _TRAFFIC):
            continue
        within = row["ranks"] <= _RANKS_OF_A_HOST
        cost = costs["within_a_host" if within else "across_hosts"]
        rows.append(
            (
                str(row["ranks"]),
                str(row["tokens"]),
                f"{_reads(row, 'own')} ({_reads(row, 'mean')})",
                *(_reads(row, *(f"{name}+{number}" for name in _CHOICES)) for number in _REDUNDANT),
                _saved(row, "own", read_seconds),
                _saved(row, "vllm", read_seconds),
                f"{1e6 * cost:.0f} us",
            )
        )
    return table(head, rows)


def _reads(row: dict[str, Any], *choices: str) -> str:
    """How many experts the busiest rank reads, the means over steps."""
    return ", ".join(f"{row['most'][choice][0]:.1f}" for choice in choices)


def _saved(row: dict[str, Any], base: str, read_seconds: float) -> str:
    """Microseconds of a layer, and where 95 % of the steps lie."""
    shown = []
    for number in _REDUNDANT:
        other = base if base in row["most"] else f"{base}+{number}"
        saved = row["saved"][f"{other} - metro+{number}"]
        mean, low, high = (round(1e6 * read_seconds * reads) for reads in saved)
        shown.append(f"{mean} ({low} to {high})")
    return "; ".join(shown)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), NAME, decode()))
