"""Checks of kernels that need no pytest, because it may be missing beside a GPU."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import ultraep_kernels.device.plan
import ultraep_kernels.host.plan
from ultraep_kernels.contract import Search

Check = TypeVar("Check", bound=Callable[..., None])


def cases(names: str, values: Iterable[Any]) -> Callable[[Check], Check]:
    """Make a check with each of ``values``: of the argument ``names``, or tuples of several."""
    several = names.split(", ")
    tuples = list(values) if len(several) > 1 else [(value,) for value in values]
    given = [dict(zip(several, each, strict=True)) for each in tuples]

    def mark(check: Check) -> Check:
        others = getattr(check, "cases", [{}])
        check.cases = [{**other, **each} for each in given for other in others]
        return check

    return mark


@contextmanager
def few_attempts() -> Iterator[None]:
    """Decorates a check that is about other things than how often the planners try."""
    few = mock.Mock(return_value=Search(512, 2, 4, 8, 2))
    with (
        mock.patch.object(ultraep_kernels.device.plan, "search_of", few),
        mock.patch.object(ultraep_kernels.host.plan, "search_of", few),
    ):
        yield
