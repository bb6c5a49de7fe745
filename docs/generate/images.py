"""Tables in deploy/README.md, from the JSON of `make images`.

python -m docs.generate.images
"""

import json
from typing import Any

from docs.generate.reference import DOCS, table, with_table

__all__ = ["PAGE", "RESULT", "TABLES"]

PAGE = DOCS.parent / "deploy" / "README.md"
RESULT = DOCS.parent / "benchmarks" / "results" / "images.json"


def _images() -> str:
    """A row for each image."""
    rows = []
    for image in _result()["images"]:
        base = f"`{image['base']}`" + (" (stand-in)" if image["is_on_stand_in"] else "")
        sizes = (f"{image[name] / 1e6:,.0f} MB" for name in ("bytes", "own_bytes"))
        rows.append((f"`{image['name']}`", base, *sizes, f"{image['seconds']:.0f} s"))
    return table(("image", "base", "size", "without its base", "built in"), rows)


def _runs() -> str:
    """A row for each way in which an image was run."""
    rows = []
    for run in _result()["runs"]:
        checks = (("" if row["is_right"] else "**not** ") + row["what"] for row in run["checks"])
        rows.append((f"`{run['image']}`", run["how"], "; ".join(dict.fromkeys(checks))))
    return table(("image", "how", "seen"), rows)


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


TABLES = {"images": _images, "runs": _runs}

if __name__ == "__main__":
    page = PAGE.read_text()
    for name, made in TABLES.items():
        page = with_table(page, name, made())
    PAGE.write_text(page)
