"""How kernels are launched, and launched again.

What a launcher works out on the host, it works out anew for every layer of every batch, though
buffers, sizes and constants are the same each time. ``Launches`` remember them.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Launches", "launch"]

_Launch: TypeAlias = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]


class _Recording(threading.local):
    """Of this thread: engines run micro-batches in threads of their own."""

    made: list[_Launch] | None = None


_recording = _Recording()


class Launches:
    """What an action launches, in order; it keeps the tensors that they were given."""

    def __init__(self) -> None:
        self._made: list[_Launch] | None = None

    def make(self, action: Callable[[], object]) -> None:
        """Do ``action``, or, if it was done before, only launch again what it launched then.

        Launches are made in the stream that is current.
        """
        if self._made is None:
            made: list[_Launch] = []
            _recording.made = made
            try:
                action()
            finally:
                _recording.made = None
            self._made = made
        else:
            for run, arguments, constants in self._made:
                run(*arguments, **constants)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """``kernel[grid](*arguments, **constants)`` for a ``triton.jit`` kernel."""
    run = kernel[grid]
    if _recording.made is not None:
        _recording.made.append((run, arguments, constants))
    run(*arguments, **constants)
