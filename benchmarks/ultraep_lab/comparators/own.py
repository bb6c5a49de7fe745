"""Policies of users: functions in a file of theirs.

Such a policy is a function of ``loads`` int64 (R, E), a ``PlanContext`` and ``history`` int64
(N, R, E), the loads of past batches, oldest first. It returns a quota, integers (E, R): how many
assignments of expert e rank r computes. Where that is more than nothing the rank needs a copy of
the expert, which takes a slot unless the rank is the expert's master. It must answer alike on every
rank, so that it may depend on nothing but its arguments.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from ultraep_lab.comparators.placement import Counts, Placement, of_quota
from ultraep_lab.integers import integers
from ultraep_lab.trace import LOADS
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.context import PlanContext

QuotaFunction = Callable[[Counts, PlanContext, Counts], Any]  # a quota, integers (E, R)


def from_file(text: str) -> QuotaFunction:
    """The function that ``text``, a ``FILE.py:NAME``, names; runs the file.

    Raises ConfigError where there is none. What the file itself raises is passed on.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"policy {text!r}: {file!r} is no Python file; write FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look there
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"policy {text!r} is no function of loads, context and history")
    return cast(QuotaFunction, found)


def place_by(function: QuotaFunction) -> Callable[[Counts, PlanContext, Counts], Placement]:
    """``function`` as the policies here are called.

    Arguments are copies, so that nothing that it changes reaches others. The placement raises
    ValueError where the answer is no quota of these loads.
    """

    def place(loads: Counts, context: PlanContext, history: Counts) -> Placement:
        answer = function(loads.copy(), context, history.copy())
        quota = integers("broken plan: the quota", answer, (2,), LOADS).astype(np.int64)
        expected = loads.shape[::-1]
        if quota.shape != expected or not np.array_equal(quota.sum(1), loads.sum(0)):
            raise ValueError(
                f"broken plan: a quota is (E, R) = {expected}, not {quota.shape}, and its rows "
                "sum to the loads"
            )
        return of_quota(quota, context.shape)

    return place
