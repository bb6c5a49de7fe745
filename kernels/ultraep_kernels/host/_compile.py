"""One decorator for everything compiled here, with the types of the plain function."""

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile for CPU on the first call, without the GIL, kept on disk for the next process.

    The cache on disk notices a change of the function's own file only. An entry point therefore
    keeps every compiled function that it calls in its own file; after a change of ``_atomics`` the
    cache has to be removed by hand. Where there is no place for it, each process compiles for
    itself. Literal arguments are types, each compiled for; ``int(False)`` and ``bool(0)`` are not.
    """
    try:
        return cast(F, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no place for the cache
        return cast(F, njit(nogil=True)(function))
