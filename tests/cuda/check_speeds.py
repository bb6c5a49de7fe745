"""Speeds that follow what ranks publish, on the device as on the host."""

import numpy as np
import torch
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH, SPEEDS, TIME
from ultraep_kernels.device.speeds import choose_speeds
from ultraep_kernels.host.speeds import follow

from tests.support.bench import Bench
from tests.support.cases import cases
from tests.support.kernel_checks import require_equal
from ultraep_serve.types import SpeedSource


def random_times(rng: np.random.Generator, num_ranks: int) -> np.ndarray:
    """Picoseconds per assignment: near each other, or far apart; rarely one is not known."""
    spread = rng.choice([0.0, 0.05, 0.2, 2.0])
    times = np.exp(rng.normal(np.log(2e7), spread, num_ranks)).clip(1, 2**31 - 1)
    times[rng.random(num_ranks) < 0.02] = 0
    return times.astype(np.int64)


@cases("num_ranks", [1, 2, 7, 64])
def test_speeds_follow_as_on_the_host(bench: Bench, num_ranks: int) -> None:
    """Batch after batch; where speeds come from changes between them."""
    rng = np.random.default_rng(num_ranks)
    rows = torch.zeros((num_ranks, HEADER_WIDTH + 3), dtype=torch.int32)
    configured = rng.integers(1, FULL_SPEED, num_ranks, endpoint=True).astype(np.int32)
    fixed = torch.from_numpy(configured).to(bench.device)
    for given in (None, fixed):
        speeds = np.full(num_ranks, FULL_SPEED, np.int64)
        agreed = torch.full((num_ranks,), FULL_SPEED, dtype=torch.int32, device=bench.device)
        used = torch.zeros_like(agreed)
        for _ in range(30):
            times = random_times(rng, num_ranks)
            source = SpeedSource(rng.choice([source.value for source in SpeedSource]))
            rows[:, TIME] = torch.from_numpy(times)
            rows[0, SPEEDS] = source.code
            choose_speeds(rows.to(bench.device), given, agreed, used)
            speeds = follow(times, speeds)
            require_equal(agreed, speeds, "agreed speeds")
            expected = speeds
            if source is SpeedSource.EQUAL:
                expected = np.full(num_ranks, FULL_SPEED)
            elif source is SpeedSource.CONFIGURED and given is not None:
                expected = configured
            require_equal(used, expected, "speeds in use")
