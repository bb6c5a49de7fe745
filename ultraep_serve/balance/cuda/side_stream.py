"""What runs on a device beside the stream that the engine launches in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["SideStream", "side_stream"]


class SideStream(Protocol):
    """Runs beside the current stream from a fork to the next ``join``."""

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside comes behind all that was launched until now."""

    def join(self) -> None:
        """What the current stream is given from now on comes behind it; nothing without a fork."""


class _CudaSideStream:
    """Of higher priority, so that it is not kept from running by what it runs beside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._forked, self._done = _new_event(), _new_event()
        self._has_forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._forked.record()
        self._stream.wait_event(self._forked)
        self._has_forked = True
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._done.record(self._stream)

    def join(self) -> None:
        if self._has_forked:
            self._has_forked = False
            torch.cuda.current_stream(self._device).wait_event(self._done)


def _new_event() -> Any:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _InOrder:
    """What stands in for it where the device is the host."""

    @contextmanager
    def fork(self) -> Iterator[None]:
        yield

    def join(self) -> None:
        pass


def side_stream(device: torch.device) -> SideStream:
    """A new one."""
    return _CudaSideStream(device) if device.type == "cuda" else _InOrder()
