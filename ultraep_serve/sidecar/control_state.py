"""What was set through the control page, as the sidecar shows it."""

from pathlib import Path
from typing import NamedTuple

from ultraep_serve.observability import ControlError, ControlPage
from ultraep_serve.sidecar.paused import paused_policy
from ultraep_serve.types import Policy

__all__ = ["ControlState", "read_control"]


class ControlState(NamedTuple):
    """What the control page says; all None where there is none."""

    policy: Policy | None = None
    max_imbalance: float | None = None  # the threshold set since the start
    paused: Policy | None = None  # what resume puts in force again


def read_control(run_dir: Path) -> ControlState:
    """The state now."""
    try:
        with ControlPage.open(run_dir) as page:
            policy, threshold = page.policy, page.max_imbalance_millionths
    except ControlError:
        return ControlState()  # an engine without balancing has no page
    paused = paused_policy(run_dir) if policy is Policy.OFF else None
    return ControlState(policy, threshold / 1e6 or None, paused)
