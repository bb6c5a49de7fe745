"""How kernels are launched, and launched again.

What a launcher works out on the host, it works out anew for every layer of every batch, though
buffers, sizes and constants are the same each time. ``Launches`` remember them.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Launches", "launch"]

_Grid: TypeAlias = tuple[int, ...]
_Launch: TypeAlias = tuple[Any, _Grid, tuple[Any, ...], dict[str, Any]]


class _Recording(threading.local):
    """Of this thread: engines run micro-batches in threads of their own."""

    made: list[_Launch] | None = None


_recording = _Recording()


class Launches:
    """What an action launches, in order; it keeps the tensors that do not change."""

    def __init__(self) -> None:
        self._made: list[_Launch] | None = None

    def make(
        self, action: Callable[[], object], grid: _Grid | None = None, **changed: object
    ) -> None:
        """Do ``action``, or, if it was done before, only launch again what it launched then.

        Again with another ``grid`` and with those arguments that were given by name ``changed``,
        where they are not the same each time. Launches are made in the stream that is current.
        """
        if self._made is None:
            made: list[_Launch] = []
            _recording.made = made
            try:
                action()
            finally:
                _recording.made = None
            self._made = [(*each, _without(named, changed)) for *each, named in made]
        else:
            for kernel, first_grid, arguments, named in self._made:
                kernel[grid or first_grid](*arguments, **named, **changed)


def _without(named: dict[str, Any], others: dict[str, object]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in others}


def launch(kernel: Any, grid: _Grid, *arguments: Any, **named: Any) -> None:
    """``kernel[grid](*arguments, **named)`` for a ``triton.jit`` kernel."""
    if _recording.made is not None:
        _recording.made.append((kernel, grid, arguments, named))
    kernel[grid](*arguments, **named)
