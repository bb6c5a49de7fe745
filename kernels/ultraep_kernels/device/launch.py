"""How kernels are launched, and launched again.

What a launcher and Triton work out on the host, they work out anew for every launch: sizes and
constants, the type of every argument, of every tensor whether it lies on the device. Of a layer all
of it stays the same but the ids, their number, and where physical ones go. ``Launches`` remember
the rest as the driver takes it: the function, and a word for each parameter.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from triton.runtime import driver

__all__ = ["Launches", "launch"]

_Grid: TypeAlias = tuple[int, ...]
_PARAMETERS = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
_SCRATCH = 2  # parameters that Triton adds; memory that no kernel here needs


class _Recording(threading.local):
    """Of this thread: engines run micro-batches in threads of their own."""

    made: "list[_Launch] | None" = None


_recording = _Recording()


class _Launch:
    """A launch that was made, to be made again with other values for some arguments."""

    def __init__(self, kernel: Any, grid: int, given: dict[str, Any], compiled: Any) -> None:
        """``compiled`` is what the launch returned, None under the interpreter."""
        self._kernel, self._grid, self._given = kernel, grid, given
        self._prepared = None if compiled is None else _Prepared.of(kernel, given, compiled)

    def forget(self, blocks: int, changed: Mapping[str, object]) -> None:
        """Keep nothing of what is to be given anew."""
        self._grid -= blocks
        for name in changed:
            del self._given[name]

    def again(self, blocks: int, changed: Mapping[str, Any]) -> None:
        """Launch with the arguments that are given, and all others as before."""
        if self._prepared is None:
            self._kernel[(self._grid + blocks,)](**self._given, **changed)
        else:
            self._prepared.launch(self._grid + blocks, changed)


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of the driver."""

    _fields_ = [
        *[(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class _Prepared:
    """A kernel's function and parameters as the driver takes them."""

    def __init__(self, compiled: Any, words: list[int], places: dict[str, int]) -> None:
        threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
        self._config = _Config(1, 1, 1, threads, 1, 1, shared)
        self._function, self._places = compiled.function, places
        self._words = (ctypes.c_uint64 * len(words))(*words)
        first, size = ctypes.addressof(self._words), ctypes.sizeof(ctypes.c_uint64)
        addresses = (first + size * number for number in range(len(words)))
        self._parameters = (ctypes.c_void_p * len(words))(*addresses)
        self._given = ctypes.addressof(self._config), ctypes.addressof(self._parameters)
        self._device, self._launch = driver.active.get_current_device(), _launch_kernel()
        self._stream_of = driver.active.get_current_stream

    @classmethod
    def of(cls, kernel: Any, given: Mapping[str, Any], compiled: Any) -> "_Prepared | None":
        """None where Triton passes anything that is not known here, as its sanitizer does."""
        words: list[int] = []
        places: dict[str, int] = {}
        for name, kind in compiled.src.signature.items():
            places[name] = len(words)
            words += _words(kind, given.get(name, kernel.signature.parameters[name].default))
        words += [0] * _SCRATCH
        found = _PARAMETERS.search(compiled.asm["ptx"])
        is_known = found is not None and found[1].count(".param") == len(words)
        return cls(compiled, words, places) if is_known else None

    def launch(self, grid: int, changed: Mapping[str, Any]) -> None:
        """In the current stream. RuntimeError: what the driver says."""
        words, places = self._words, self._places
        for name, value in changed.items():
            words[places[name]] = value if isinstance(value, int) else value.data_ptr()
        config, parameters = self._given
        self._config.grid_x, self._config.stream = grid, self._stream_of(self._device)
        error = self._launch(config, self._function, parameters, None)
        if error:
            raise RuntimeError(f"CUDA error {error} at a launch")


def _words(kind: Any, value: Any) -> Iterator[int]:
    """Parameters that an argument of Triton's type ``kind`` has."""
    if isinstance(kind, tuple):
        for part in zip(kind, value, strict=True):
            yield from _words(*part)
    elif kind != "constexpr":
        word = value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
        yield word & (1 << 64) - 1


@cache
def _launch_kernel() -> Any:
    """``cuLaunchKernelEx`` of the driver."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


class Launches:
    """What an action launches, in order; it keeps the tensors that do not change."""

    def __init__(self) -> None:
        self._made: list[_Launch] | None = None

    def make(
        self,
        action: Callable[[], object],
        blocks: int = 0,
        changed: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Do ``action``, or, if it was done before, only launch again what it launched then.

        Again with the arguments that are named in ``changed``, where they are not the same each
        time: tensors of the same types, and numbers below 2**31, of no value that a kernel is
        compiled for; and with as many programs more or fewer as there are ``blocks`` of ids.
        Launches are made in the current stream.
        """
        if self._made is None:
            made: list[_Launch] = []
            _recording.made = made
            try:
                action()
            finally:
                _recording.made = None
            for each in made:
                each.forget(blocks, changed)
            self._made = made
        else:
            for each in self._made:
                each.again(blocks, changed)


def launch(kernel: Any, grid: _Grid, *arguments: Any, **named: Any) -> None:
    """``kernel[grid](*arguments, **named)`` for a ``triton.jit`` kernel."""
    compiled = kernel[grid](*arguments, **named)
    if _recording.made is not None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        _recording.made.append(_Launch(kernel, grid[0], given, compiled))
