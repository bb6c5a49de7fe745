"""Costs measured at start-up: fitted to a line, plausible, and the same on every rank."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ultraep_serve.costs.calibration import LEAST_ROWS, Probes, agreed_costs, fit
from ultraep_serve.types import ExpertShape

SHAPE = ExpertShape(num_ranks=2, num_logical_experts=8, num_replica_slots=1)


def probes(seconds: Callable[[Callable[[], object]], float], **more: Any) -> Probes:
    """Of a machine on which only a layer's time is to be measured, by ``seconds``."""
    return Probes(
        seconds=seconds,
        exchange=lambda: 1e-5,
        send_expert=lambda: 1e-4,
        plan=lambda: 1e-5,
        gather=lambda own: own[None],
        bytes_before_relay=1000,
        **more,
    )


def test_a_machine_too_busy_to_measure_still_starts(caplog: pytest.LogCaptureFixture) -> None:
    noise = iter((3e-3, 2e-3, 1e-3))
    costs = agreed_costs(None, SHAPE, 4000, probes(lambda _: next(noise)), lambda _: None)
    assert costs.base_seconds == 0
    assert costs.relay_hop_seconds == pytest.approx(1e-5 + 1e-4 / 4)  # a quarter of an expert
    assert costs.seconds_per_assignment == 1e-3 / (4 * LEAST_ROWS * SHAPE.num_masters)
    assert "costs are an upper bound" in caplog.text


def test_where_times_are_far_off_a_line_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    measured = iter((1e-3, 9e-3, 4e-3))
    sizes = []
    made = probes(lambda action: (action(), next(measured))[1], rows_per_master=(1024, 2048, 4096))
    costs = agreed_costs(None, SHAPE, 4000, made, sizes.append)
    assert costs.seconds_per_assignment > 0
    assert sizes == [4096, 4096, 8192, 16384]  # the first warms up
    (warning,) = caplog.messages
    assert "off a line; give --costs" in warning


def test_fit_recovers_known_costs(caplog: pytest.LogCaptureFixture) -> None:
    work = [100, 1000, 5000, 20_000, 60_000]
    exact = fit([(x, 3e-4 + 2.5e-6 * x) for x in work])
    assert exact == pytest.approx((2.5e-6, 3e-4), rel=1e-9)
    rng = np.random.default_rng(0)
    noisy = fit([(x, (3e-4 + 2.5e-6 * x) * rng.uniform(0.95, 1.05)) for x in work * 20])
    assert noisy[0] == pytest.approx(2.5e-6, rel=0.03)
    assert not caplog.messages
    assert fit([(100, 1e-6), (200, 9e-6)])[1] == 0.0  # else it would be below
