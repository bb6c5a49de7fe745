"""Tables of the lab's commands, for a terminal of 80 characters."""

from collections.abc import Collection, Sequence

from rich import box
from rich.table import Table


def figures_table(
    heads: Sequence[str], texts: Collection[str] = (), title: str | None = None, padding: int = 1
) -> Table:
    """A table without rows: numbers under all ``heads`` but ``texts``, which fold if too long."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    for head in heads:
        if head in texts:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    return table
