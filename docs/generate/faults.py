"""The table of injected faults in docs/dev/faults.md, from the JSON of `make check-faults`.

python -m docs.generate.faults
"""

import json
from pathlib import Path

from docs.generate.reference import DOCS, table, with_table

__all__ = ["NAME", "PAGE", "RESULT", "injected"]

PAGE = DOCS / "dev" / "faults.md"
RESULT = DOCS.parent / "benchmarks" / "results" / "faults.json"
NAME = "injected"


def injected(result: Path = RESULT) -> str:
    """A row for each fault, a column for each stage."""
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for row in json.loads(result.read_text())["faults"]:
        seen.setdefault((row["what"], row["how"]), {})[row["stage"]] = row["seen"]
    stages = list(dict.fromkeys(stage for row in seen.values() for stage in row))
    in_order = sorted(stages, key=["start", "load", "serve", "policy switch", "stop"].index)
    rows = (
        (what, how, *(row.get(stage, "\N{EN DASH}") for stage in in_order))
        for (what, how), row in seen.items()
    )
    return table(("what", "how", *in_order), rows)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), NAME, injected()))
