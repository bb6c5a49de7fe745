"""Command lines of the engines' own guides, as ``docs/recipes.md`` lists them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
# Flags that no line of a guide has: this machine has no GPU.
_MORE = {"vllm": [], "sglang": ["--device", "cuda"]}


class Row(NamedTuple):
    """One line, and what the page says of it."""

    guide: str
    line: str
    result: str
    accepted_with: str

    @property
    def engine(self) -> str:
        return self.line.split()[0]

    @property
    def words(self) -> list[str]:
        """What follows `ultraep-serve ENGINE`."""
        words = shlex.split(self.line)[2:]
        return [*(words if words[0].startswith("-") else ["--model", *words]), *_MORE[self.engine]]


def _rows() -> list[Row]:
    _, _, text = PAGE.read_text().partition("<!-- published lines -->\n")
    _, _, *lines = text.partition("<!-- end -->")[0].splitlines()
    return [
        Row(*(re.sub(r"`", "", cell).strip() for cell in line.strip("|").split(" |")))
        for line in lines
    ]


ROWS = _rows()
