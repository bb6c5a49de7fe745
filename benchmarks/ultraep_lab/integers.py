"""Integers that come from outside, checked before anything is computed from them.

Nothing is rounded, cut off or wrapped around: what is no integer in its range is refused.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.errors import TraceError

Integers = NDArray[np.integer]
_SHOWN = 80  # characters of a wrong value, at most


def integers(what: str, given: Any, dimensions: tuple[int, ...], valid: range) -> Integers:
    """``given``, an array, a tensor or nested lists, as an array of the type that it has.

    Args:
        what: its name, for errors.
        given: anything.
        dimensions: one of these numbers of dimensions it must have.
        valid: the least and the highest value.

    Raises:
        TraceError: it is no array of integers, or has a value that is not in ``valid``.
    """
    try:
        array = np.asarray(given)
    except (RuntimeError, TypeError, ValueError) as error:  # ragged; a tensor of no type of NumPy's
        raise TraceError(f"{what} is no array of integers: {error}") from error
    if array.ndim not in dimensions or array.dtype.kind not in "iu":
        raise TraceError(
            f"{what} is {array.dtype} {array.shape}, must be integers with "
            f"{' or '.join(map(str, dimensions))} dimensions"
        )
    for value in (array.max(), array.min()) if array.size else ():
        if int(value) not in valid:
            raise TraceError(f"{what} has {value}, must be {valid[0]} to {valid[-1]}")
    return array


def integer(what: str, given: Any, valid: range) -> int:
    """``given`` as one integer of ``valid``. Raises TraceError as ``integers``."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given in valid:
        return int(given)
    raise TraceError(
        f"{what} = {repr(given)[:_SHOWN]} must be a whole number, {valid[0]} to {valid[-1]}"
    )
