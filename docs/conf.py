"""The site that `make docs` builds. Its pages are plain Markdown, to be read on a code host too."""

import json
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

project = "ultraep_serve"
extensions = ["myst_parser"]
exclude_patterns = ["images"]
html_theme = "furo"
html_title = "ultraep_serve"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"

myst_heading_anchors = 3  # as code hosts make them, so that links lead there in both places
nitpicky = True


class NotebookParser(MystParser):
    """A notebook as a page: its text, its code, and what that printed and drew."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        cells = json.loads(inputstring)["cells"]
        super().parse("\n\n".join(map(_as_markdown, cells)), document)


def _as_markdown(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = map(_output_as_markdown, cell["outputs"])
    return "\n\n".join([f"```python\n{source}\n```", *outputs])


def _output_as_markdown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the cell draws](data:image/png;base64,{data['image/png'].strip()})"
    printed = "".join(output.get("text") or data["text/plain"])
    return f"```text\n{printed.rstrip()}\n```"


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
