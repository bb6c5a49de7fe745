"""The table in docs/dev/releases.md, from the JSON of `make engine-next`.

python -m docs.generate.releases
"""

import json
from typing import Any

from docs.generate.reference import DOCS, table, with_table

__all__ = ["PAGE", "tables"]

PAGE = DOCS / "dev" / "releases.md"
_RESULT = DOCS.parent / "benchmarks" / "results" / "engine-next.json"


def tables() -> dict[str, str]:
    """Every table of the page, by name."""
    rows = json.loads(_RESULT.read_text())["releases"]
    head = ("package", "release", "verified", "contract tests", "new packages")
    return {"newest": table(head, map(_release, rows))}


def _release(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"`{row['package']}`"
    if "problem" in row:
        return (name, row.get("version", ""), "", row["problem"], "")
    if "failed" in row:
        tests = f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped"
    else:
        tests = row.get("tests", f"none ran: `{row['imports']}`")
    return (
        name,
        row["version"],
        "yes" if row["verified"] else "no",
        tests,
        ", ".join(f"`{name}`" for name in row.get("new requirements", ())) or "none",
    )


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, made in tables().items():
        page = with_table(page, name, made)
    PAGE.write_text(page)
