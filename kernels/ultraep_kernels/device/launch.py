"""How kernels are launched, and launched again.

What a launcher and Triton work out on the host, they work out anew for every launch: sizes and
constants, the type of every argument, of every tensor whether it lies on the device. Of a layer all
of it stays the same but the ids, their number, and where physical ones go, which are ``Changing``.
``Launches`` remember the rest as the driver takes it: the function, and where each parameter lies.
"""

import ctypes
import re
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from triton.runtime import driver

__all__ = ["Changing", "Launches", "launch"]

_Grid: TypeAlias = tuple[int, ...]
_Made: TypeAlias = tuple[Any, int, dict[str, Any], Any]  # kernel, grid, given, what it returned
_PARAMETERS = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
_SCRATCH = ("global_scratch_size", "profile_scratch_size")  # of memory that Triton adds
_WORD = ctypes.sizeof(ctypes.c_uint64)


class Changing:
    """Arguments by name that are not the same each time, where all launches read them.

    Tensors of the same types, and numbers below 2**31, of no value that a kernel is compiled for.
    """

    def __init__(self, *names: str) -> None:
        self._words = array("Q", [0] * len(names))
        first, _ = self._words.buffer_info()
        self.addresses = {name: first + _WORD * place for place, name in enumerate(names)}

    def set(self, *words: int) -> None:
        """For launches from now on: numbers, and where tensors begin, for the first names."""
        for place, word in enumerate(words):
            self._words[place] = word


class _Recording(threading.local):
    """Of this thread: engines run micro-batches in threads of their own."""

    made: list[_Made] | None = None


_recording = _Recording()


class _Config(ctypes.Structure):
    """``CUlaunchConfig`` of the driver."""

    _fields_ = [
        *[(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


def _launch_again(made: _Made, changing: Changing, stays: bool) -> Callable[[int], None] | None:
    """What makes the launch again with so many programs more, in the stream that is current then.

    Or, where it ``stays``, in the one that is current now. It raises RuntimeError: what the driver
    says. None where Triton has compiled nothing, as its interpreter, or passes memory of its own or
    anything that is not known here, as its sanitizer does.
    """
    kernel, grid, given, compiled = made
    if compiled is None or any(getattr(compiled.metadata, name) for name in _SCRATCH):
        return None
    words: list[int] = []
    changed: dict[int, int] = {}
    for name, kind in compiled.src.signature.items():
        if name in changing.addresses:
            changed[len(words)] = changing.addresses[name]
        words += _words(kind, given.get(name, kernel.signature.parameters[name].default))
    words += [0] * len(_SCRATCH)  # none of it is needed
    found = _PARAMETERS.search(compiled.asm["ptx"])
    if found is None or found[1].count(".param") != len(words):
        return None
    values = (ctypes.c_uint64 * len(words))(*words)
    first = ctypes.addressof(values)
    places = (changed.get(place, first + _WORD * place) for place in range(len(words)))
    parameters = (ctypes.c_void_p * len(words))(*places)
    threads, shared = 32 * compiled.metadata.num_warps, compiled.metadata.shared
    config = _Config(1, 1, 1, threads, 1, 1, shared)
    # objects of ctypes, which it would make anew for every call
    arguments = ctypes.byref(config), ctypes.c_void_p(compiled.function), parameters, None
    launch_kernel, stream_of = _launch_kernel(), driver.active.get_current_stream
    device = driver.active.get_current_device()
    stream = stream_of(device) if stays else None
    kept = {name: each for name, each in given.items() if name not in changing.addresses}

    def again(more: int, _kept: object = (values, changing, kept)) -> None:
        config.grid_x = grid + more
        config.stream = stream_of(device) if stream is None else stream
        error = launch_kernel(*arguments)
        if error:
            raise RuntimeError(f"CUDA error {error} at a launch")

    return again


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
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx


_NOTHING = Changing()


class Launches:
    """What an action launches, in order; it keeps the tensors that do not change."""

    def __init__(self, changing: Changing = _NOTHING) -> None:
        """``changing`` is set before each time."""
        self._changing = changing
        self._again: list[Callable[[int], None]] = []
        self._blocks: int | None = None  # of the time it was done

    def make(
        self,
        action: Callable[[], object],
        blocks: int = 0,
        stream: torch.Stream | None = None,
    ) -> None:
        """Do ``action``, or, if it was done before, only launch again what it launched then.

        Again with what ``changing`` has by then, and with as many programs more or fewer as there
        are ``blocks`` of ids. All in the current stream or in ``stream``, the same each time.
        """
        if self._blocks is not None:
            for again in self._again:
                again(blocks - self._blocks)
            return
        with stream or nullcontext():
            made: list[_Made] = []
            _recording.made = made
            try:
                action()
            finally:
                _recording.made = None
            found = [_launch_again(each, self._changing, stream is not None) for each in made]
        self._again = [again for again in found if again is not None]
        if len(self._again) == len(made):
            self._blocks = blocks


def launch(kernel: Any, grid: _Grid, *arguments: Any, **named: Any) -> None:
    """``kernel[grid](*arguments, **named)`` for a ``triton.jit`` kernel."""
    compiled = kernel[grid](*arguments, **named)
    if _recording.made is not None:
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        _recording.made.append((kernel, grid[0], given, compiled))
