"""Tables in docs/dev/releases.md, from the adapters' seams and the JSON of `make engine-next`.

python -m docs.generate.releases
"""

import json
import re
from itertools import pairwise
from typing import Any

from docs.generate.reference import DOCS, table, with_table
from ultraep_serve.engines.common.seams import Seam
from ultraep_serve.engines.sglang.seams import SEAMS as SGLANG_SEAMS
from ultraep_serve.engines.vllm.seams import SEAMS as VLLM_SEAMS

__all__ = ["PAGE", "tables"]

PAGE = DOCS / "dev" / "releases.md"
_RESULT = DOCS.parent / "benchmarks" / "results" / "engine-next.json"


def tables() -> dict[str, str]:
    """Every table of the page, by name."""
    document = json.loads(_RESULT.read_text())
    return {
        "newest": _newest(document["releases"]),
        "history": _history(document["history"]),
        "seams-vllm": _seams(VLLM_SEAMS),
        "seams-sglang": _seams(SGLANG_SEAMS),
    }


def _newest(rows: list[dict[str, Any]]) -> str:
    head = ("package", "release", "verified", "seams that moved", "contract tests", "new packages")
    return table(head, map(_release, rows))


def _release(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"`{row['package']}`"
    if "problem" in row:
        return (name, row.get("version", ""), "", row["problem"], "", "")
    if "imports" not in row:
        tests = "not run"
    elif "failed" in row:
        tests = f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
    else:
        tests = row.get("tests", f"none ran: `{row['imports']}`")
    return (
        name,
        row["version"],
        "yes" if row["verified"] else "no",
        f"{len(row['moved'])} of {row['seams']}",
        tests,
        ", ".join(f"`{name}`" for name in row.get("new requirements", ())) or "none",
    )


def _history(rows: list[dict[str, Any]]) -> str:
    """What a release brought is what the one before it, a row below, has otherwise."""
    cells = []
    for row, before in pairwise(rows):
        if row["package"] != before["package"]:
            continue
        came = [
            f"`{target}` {_without(problem, row['moved'].get(target, ''))}"
            for target, problem in before["moved"].items()
            if row["moved"].get(target) != problem
        ]
        text = "; ".join(came) or "nothing"
        cells.append((f"`{row['package']}`", row["version"], before["version"], text))
    head = ("package", "release", "the one before it", "what is otherwise in the one before it")
    return table(head, cells)


def _without(problem: str, other: str) -> str:
    """``problem`` without the names that ``other`` has too."""
    clauses = []
    for clause in problem.split(" and "):
        verb, *names = re.split(r"(?<=has no|ot use|t take) |, ", clause)
        left = [name for name in names if name not in re.findall(r"\w+", other)]
        clauses += [f"{verb} {', '.join(left)}".strip()] if left or not names else []
    return " and ".join(clauses)


def _seams(listed: tuple[Seam, ...]) -> str:
    return table(
        ("place", "what for", "expected"),
        ((f"`{seam.target}`", seam.purpose, _expected(seam)) for seam in listed),
    )


def _expected(seam: Seam) -> str:
    parts = [
        *([f"parameters {_names(seam.parameters)}"] if seam.parameters else []),
        *([f"takes {_names(seam.passed)}"] if seam.passed else []),
        *([f"has {_names(seam.attributes)}"] if seam.attributes else []),
        *([f"uses {_names(seam.mentions)}"] if seam.mentions else []),
    ]
    return "; ".join(parts) or "is there"


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, made in tables().items():
        page = with_table(page, name, made)
    PAGE.write_text(page)
