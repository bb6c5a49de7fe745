"""How kernels are launched, and launched again.

What a launcher works out on the host, it works out anew for every layer of every batch, though
buffers, sizes and constants are the same each time. ``Launches`` remember them, and what Triton
made of them: it would look at every argument's type anew, and ask the driver about every tensor.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

__all__ = ["Launches", "launch"]

_Grid: TypeAlias = tuple[int, ...]
_ALIGNMENT = 16  # of addresses and integers, by which Triton tells kernels apart


class _Recording(threading.local):
    """Of this thread: engines run micro-batches in threads of their own."""

    made: "list[_Launch] | None" = None


_recording = _Recording()


class _Launch:
    """A launch that was made, to be made again with other values for some arguments."""

    def __init__(
        self,
        kernel: Any,
        grid: _Grid,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        compiled: Any,
    ) -> None:
        """``compiled`` is what the launch returned, None under the interpreter."""
        self._kernel, self._grid = kernel, grid
        self._given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        self._places = {name: place for place, name in enumerate(kernel.arg_names)}
        self._compiled = compiled  # for the arguments of this launch
        self._ready: dict[Any, tuple[Any, list[Any]]] = {}  # by the kinds of what changed

    def settle(self, changed: Mapping[str, object]) -> None:
        """Take ``changed`` by name for what may change."""
        first = {name: self._given.pop(name) for name in changed}  # which are not kept
        self._keep(self._compiled, first)
        self._compiled = None

    def again(self, grid: _Grid | None, changed: Mapping[str, object]) -> None:
        """Launch with the arguments that are given, and all others as before."""
        grid = grid or self._grid
        ready = self._ready.get(_kinds_of(changed))
        if ready is None:
            self._keep(self._kernel[grid](**{**self._given, **changed}), changed)
            return
        compiled, values = ready
        values = values.copy()
        for name, value in changed.items():
            values[self._places[name]] = _raw(value)
        compiled[(*grid, 1, 1)[:3]](*values)

    def _keep(self, compiled: Any, changed: Mapping[str, object]) -> None:
        if compiled is None:
            return
        given, parameters = {**self._given, **changed}, self._kernel.signature.parameters
        values = [given.get(name, parameters[name].default) for name in self._places]
        for name in changed:
            values[self._places[name]] = None
        self._ready[_kinds_of(changed)] = compiled, [_raw(value) for value in values]


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
            for each in made:
                each.settle(changed)
            self._made = made
        else:
            for each in self._made:
                each.again(grid, changed)


def _kinds_of(changed: Mapping[str, object]) -> tuple[object, ...]:
    """What of these values Triton compiles a kernel for."""
    return tuple(map(_kind_of, changed.values()))


def _kind_of(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, int):
        return value == 1, value % _ALIGNMENT == 0, value.bit_length() > 31
    return value


def _raw(value: Any) -> Any:
    """``value`` with addresses for the tensors of the device, of which nobody asks the driver."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cuda else value
    if isinstance(value, tuple):
        return tuple(map(_raw, value))
    return value


def launch(kernel: Any, grid: _Grid, *arguments: Any, **named: Any) -> None:
    """``kernel[grid](*arguments, **named)`` for a ``triton.jit`` kernel."""
    compiled = kernel[grid](*arguments, **named)
    if _recording.made is not None:
        _recording.made.append(_Launch(kernel, grid, arguments, named, compiled))
