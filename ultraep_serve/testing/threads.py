"""Keep torch on one thread while it does many short operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Run the body on one torch thread, if ``wanted``.

    Each parallel operation waits for all its threads; on a busy machine that wait is a time slice,
    so thousands of short operations take minutes on two threads and seconds on one.
    """
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
