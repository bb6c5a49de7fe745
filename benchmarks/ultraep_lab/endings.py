"""What is put back however a program ends: by an error, Ctrl-C, SIGTERM, or a lost terminal."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ultraep_serve.errors import UltraEPError

__all__ = ["undone"]

_LOGGER = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undone(undo: Callable[[], None], what: str) -> Iterator[None]:
    """Call ``undo`` when the block ends. The first signal that would end the program is Ctrl-C.

    Later signals wait until ``undo`` has returned. After an error, one of ``undo``, which puts back
    ``what``, is only logged. Raises KeyboardInterrupt for signals.
    """
    ending = _Ending()
    with ending.takes_signals():
        try:
            try:
                yield
            finally:
                ending.began = True  # no signal keeps undo from being called from here on
        except BaseException:
            try:
                undo()
            except UltraEPError as error:  # the first error is the one to report
                _LOGGER.warning("%s could not be put back: %s", what, error)
            raise
        undo()
    if ending.late:
        raise KeyboardInterrupt


class _Ending:
    """Makes the first signal an exception and keeps the others."""

    def __init__(self) -> None:
        self.began = False
        self.late = False

    @contextmanager
    def takes_signals(self) -> Iterator[None]:
        """Signals that are ignored, such as SIGHUP under nohup, stay so."""
        if threading.current_thread() is not threading.main_thread():
            yield  # the main thread takes them
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        try:
            for number in taken:
                signal.signal(number, self._take)
            yield
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.began:
            self.late = True
            return
        self.began = True
        raise KeyboardInterrupt
