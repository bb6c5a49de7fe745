"""benchmarks/results/images.md, from the JSON of `make images`.

python -m docs.generate.images
"""

import json
from typing import Any

from docs.generate.reference import DOCS, table

__all__ = ["PAGE", "RESULT", "page"]

RESULT = DOCS.parent / "benchmarks" / "results" / "images.json"
PAGE = RESULT.with_suffix(".md")
_PAGE = """\
# Images

`make images` builds these on a machine that reaches no registry of images: a *stand-in*, a Debian
with a Python of the same version, takes the place of a base that cannot be pulled. Images on the
engines' own ones are then left out.

{}
They were run as Kubernetes runs them: without capabilities, with a read-only root and a network of
their own. `/home/ultraep/.cache` is a volume, and `/tmp` is memory.

{}"""


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


def page() -> str:
    """The whole page."""
    return _PAGE.format(_images(), _runs())


if __name__ == "__main__":
    PAGE.write_text(page())
