"""Tables and progress of the lab's commands, for a terminal of 80 characters."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

__all__ = ["figures_table", "quiet_progress"]


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


@contextmanager
def quiet_progress(column: ProgressColumn) -> Iterator[Progress]:
    """A bar with ``column`` that is redrawn when its task is told to refresh.

    A thread of its own would take time from the server that is measured.
    """
    console = Console(stderr=True)
    with Progress(
        BarColumn(),
        column,
        TextColumn("{task.description}"),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=24 * 3600,
    ) as progress:
        yield progress
