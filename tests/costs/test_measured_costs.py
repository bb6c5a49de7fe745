"""Measured costs beside the table of hardware."""

import pytest

from ultraep_serve.costs.hardware import EXCHANGE_SECONDS, HARDWARE
from ultraep_serve.costs.model import CostModel
from ultraep_serve.verify.costs import check_costs

EXPERT_BYTES = 10 << 20
LINK = HARDWARE["h100"].link_bytes_per_second


def measured(link: float = 0.6 * LINK, exchange: float = EXCHANGE_SECONDS) -> CostModel:
    return CostModel(1e-9, EXPERT_BYTES, link, exchange_seconds=exchange, plan_seconds=1e-4)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GB200"])
def test_costs_near_the_table_are_no_warning(name: str) -> None:
    link = 0.6 * HARDWARE[name.split()[1].lower()].link_bytes_per_second
    found = check_costs(measured(link), 0.5, name)
    assert (found.name, found.seconds, found.warning) == ("costs", 0.5, "")
    assert "an exchange: 0.02 ms" in found.detail


def test_a_slow_link_and_a_slow_exchange_are_warned_of() -> None:
    found = check_costs(measured(LINK / 10, 8 * EXCHANGE_SECONDS), 0.5, "NVIDIA H100 80GB HBM3")
    assert "a copy takes" in found.warning
    assert "8.0 times what is expected" in found.warning
    assert "a plan" not in found.warning


@pytest.mark.parametrize("name", ["", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX H1000"])
def test_what_the_table_does_not_know_is_compared_with_nothing(name: str) -> None:
    assert not check_costs(measured(1e6, 10.0), 0.5, name).warning
