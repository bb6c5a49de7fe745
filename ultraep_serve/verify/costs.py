"""What a copy, an exchange and a plan take on this machine, beside what they should."""

import re

from ultraep_serve.costs.hardware import (
    EXCHANGE_SECONDS,
    HARDWARE,
    PLAN_AND_REROUTE_SECONDS,
    Efficiency,
)
from ultraep_serve.costs.model import CostModel
from ultraep_serve.types import CheckResult

__all__ = ["check_costs"]

# The table holds published peaks and assumed shares of them. Machines that are well differ from it
# by up to two; a link that is not the one expected, or a stage that waits for the host, by ten.
_FAR = 3.0


def check_costs(costs: CostModel, seconds: float, device_name: str = "") -> CheckResult:
    """``costs`` that took ``seconds`` to measure, with a warning where they are far from the table.

    ``device_name`` is what the driver calls the GPU; CPUs, and GPUs that the table does not know,
    are compared with nothing. Costs only decide whether balancing pays, so none is an error.
    """
    copy = costs.bytes_per_expert / costs.link_bytes_per_second
    measured = {"a copy": copy, "an exchange": costs.exchange_seconds, "a plan": costs.plan_seconds}
    detail = ", ".join(f"{name}: {_milliseconds(taken)}" for name, taken in measured.items())
    known = [
        peaks for name, peaks in HARDWARE.items() if re.search(rf"\b{name}\b", device_name.lower())
    ]
    if not known:
        return CheckResult("costs", seconds, detail)
    reached = known[0].link_bytes_per_second * Efficiency().link
    expected = {
        "a copy": costs.bytes_per_expert / reached,
        "an exchange": EXCHANGE_SECONDS,
        "a plan": PLAN_AND_REROUTE_SECONDS,
    }
    far = [
        f"{name} takes {_milliseconds(taken)}, {taken / expected[name]:.1f} times what is expected"
        for name, taken in measured.items()
        if taken > _FAR * expected[name]
    ]
    return CheckResult("costs", seconds, detail, "; ".join(far))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
