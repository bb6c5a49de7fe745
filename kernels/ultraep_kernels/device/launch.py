"""How a kernel is launched, and launched again.

Triton works out anew for every launch the type of every argument, and of every tensor whether it
lies on the device. Of a layer all of it stays the same but some addresses and numbers, so a
``Launch`` remembers the rest as the driver takes it: the function, and where each parameter lies.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from triton.runtime import driver

Changing: TypeAlias = torch.Tensor | int
_PARAMETERS = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
_SCRATCH = ("global_scratch_size", "profile_scratch_size")  # of memory that Triton adds
_WORD = ctypes.sizeof(ctypes.c_uint64)


class Launch:
    """Launches one kernel with what was ``given`` once, and with what changes each time.

    It keeps the tensors that were given. One thread at a time.
    """

    def __init__(
        self,
        kernel: Any,
        changing: tuple[str, ...],
        given: dict[str, Any],
        *,
        stream: torch.Stream | None = None,
        **options: int,
    ) -> None:
        """``kernel`` is a ``triton.jit`` one, ``options`` are those of its compiler.

        ``changing`` arguments, by name, are tensors and numbers below 2**63 of no value that the
        kernel is compiled for. Launches go to ``stream``, or to the one that is current then.
        """
        self._kernel, self._names = kernel, changing
        self._given, self._options, self._stream = given, options, stream
        self._again: dict[torch.dtype, Callable[..., None]] = {}

    def __call__(self, programs: int, first: torch.Tensor, *others: Changing) -> None:
        """Launch so many programs; ``others`` have the same type each time.

        They are kept, and not looked at again while they are the same objects. Raises
        RuntimeError: what the driver says.
        """
        again = self._again.get(first.dtype)
        if again is not None:
            again(programs, first, *others)
            return
        given = self._given | dict(zip(self._names, (first, *others), strict=True))
        with self._stream or nullcontext():
            compiled = self._kernel[(programs,)](**given, **self._options)
            again = self._prepared(compiled, given)
        if again is not None:
            self._again[first.dtype] = again

    def _prepared(self, compiled: Any, given: dict[str, Any]) -> Callable[..., None] | None:
        """What makes the launch again.

        None where Triton has compiled nothing, as its interpreter, or passes memory of its own or
        anything that is not known here, as its sanitizer does.
        """
        if compiled is None or any(getattr(compiled.metadata, name) for name in _SCRATCH):
            return None
        words: list[int] = []
        place_of: dict[str, int] = {}
        for name, kind in compiled.src.signature.items():
            place_of[name] = len(words)
            words += _words(kind, given.get(name, self._kernel.signature.parameters[name].default))
        words += [0] * len(_SCRATCH)  # none of it is needed
        found = _PARAMETERS.search(compiled.asm["ptx"])
        if found is None or found[1].count(".param") != len(words):
            return None
        values = (ctypes.c_uint64 * len(words))(*words)
        start = ctypes.addressof(values)
        parameters = (ctypes.c_void_p * len(words))(
            *(start + _WORD * place for place in range(len(words)))
        )
        first_place, *other_places = (place_of[name] for name in self._names)
        kept: list[Changing | None] = [None] * len(other_places)
        metadata = compiled.metadata
        config = _Config(1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared)
        # objects of ctypes, which it would make anew for every call
        arguments = ctypes.byref(config), ctypes.c_void_p(compiled.function), parameters, None
        launch_kernel, stream_of = _launch_kernel(), driver.active.get_current_stream
        device, stays = driver.active.get_current_device(), self._stream is not None
        config.stream = stream_of(device)

        def again(programs: int, first: torch.Tensor, *others: Changing) -> None:
            values[first_place] = first.data_ptr()
            for index, value in enumerate(others):
                if value is not kept[index]:
                    kept[index] = value
                    values[other_places[index]] = _word(value)
            config.grid_x = programs
            if not stays:
                config.stream = stream_of(device)
            error = launch_kernel(*arguments)
            if error:
                raise RuntimeError(f"CUDA error {error} at a launch")

        return again


class _Config(ctypes.Structure):
    _fields_ = [
        *[(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"],
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


def _words(kind: Any, value: Any) -> Iterator[int]:
    """Parameters that an argument of Triton's type ``kind`` has."""
    if isinstance(kind, tuple):
        for part in zip(kind, value, strict=True):
            yield from _words(*part)
    elif kind != "constexpr":
        yield _word(value) & (1 << 64) - 1


def _word(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else int(value)


@cache
def _launch_kernel() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
