"""Pictures; needs matplotlib, draws without a display."""

import io
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ultraep_serve.errors import UnsupportedError

__all__ = ["picture", "require_matplotlib"]


def require_matplotlib() -> None:
    """Before the work, find out whether it can be drawn. Raises UnsupportedError."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            'pictures need matplotlib; run `pip install ".[analysis]"` in a checkout', otherwise=""
        )


def picture(
    *paints: Callable[[Any], None],
    file_type: str = "png",
    size: tuple[float, float] = (9.5, 4.5),
    columns: int = 1,
) -> bytes:
    """What ``paints`` draw, each on axes of its own; the same bytes for the same drawing.

    ``size`` in inches. Raises UnsupportedError where matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    for number, paint in enumerate(paints):
        axes = figure.add_subplot(-(-len(paints) // columns), columns, number + 1)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
    stream = io.BytesIO()
    is_svg = file_type == "svg"
    with matplotlib.rc_context({"svg.hashsalt": "ultraep"}):
        figure.savefig(stream, format=file_type, metadata={"Date": None} if is_svg else None)
    return stream.getvalue()
