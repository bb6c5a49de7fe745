"""benchmarks/results/faults.md, from the JSON of `make check-faults` and `make check-containers`.

python -m docs.generate.faults
"""

import json
from pathlib import Path

from docs.generate.reference import DOCS, table

__all__ = ["PAGE", "RESULT", "page"]

RESULT = DOCS.parent / "benchmarks" / "results" / "faults.json"
PAGE = RESULT.with_suffix(".md")
_PAGE = """\
# Faults that were injected

[Faults](../../docs/dev/faults.md) explains the words. "waits" means here that nothing goes on until
a stopped process does.

{}
## Containers

{}"""


def page() -> str:
    """The whole page."""
    return _PAGE.format(_injected(), _containers())


def _injected(result: Path = RESULT) -> str:
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


def _containers() -> str:
    """A row for each container."""
    none = "\N{EN DASH}"
    rows = []
    for row in json.loads(RESULT.with_name("containers.json").read_text())["containers"]:
        after = row["imbalance_after"]
        imbalance = none if after is None else f"{row['imbalance_before']:.2f} to {after:.2f}"
        stopped = none if row["stop_seconds"] is None else f"{row['stop_seconds']:.1f} s"
        said = f"`{row['said']}`" if row["said"] else none
        rows.append((row["container"], row["seen"], imbalance, stopped, said))
    return table(("container", "seen", "imbalance", "stops in", "says"), rows)


if __name__ == "__main__":
    PAGE.write_text(page())
