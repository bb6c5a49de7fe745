"""Speeds that ranks measure, on the device as on the host."""

import numpy as np
import torch
from ultraep_kernels.contract import HEADER_WIDTH, POLICY, TIME, Policy
from ultraep_kernels.device.outcome import outcome_width, unpack_outcome
from ultraep_kernels.device.status import new_status
from ultraep_kernels.host.speeds import measured_speeds

from tests.support.bench import Bench
from tests.support.cases import cases
from tests.support.kernel_checks import plan


def random_times(rng: np.random.Generator, num_ranks: int) -> np.ndarray:
    """Picoseconds per assignment: near each other, or far apart; rarely one is not known."""
    spread = rng.choice([0.0, 0.05, 0.2, 2.0])
    times = np.exp(rng.normal(np.log(2e7), spread, num_ranks)).clip(1, 2**31 - 1)
    times[rng.random(num_ranks) < 0.02] = 0
    return times.astype(np.int64)


@cases("num_ranks", [1, 2, 7, 64])
def test_ranks_are_as_fast_as_on_the_host(bench: Bench, num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    rows = torch.zeros((num_ranks, HEADER_WIDTH + num_ranks), dtype=torch.int32)
    rows[0, POLICY] = Policy.QUOTA.code
    told = torch.zeros(outcome_width(num_ranks, num_ranks, 0), dtype=torch.int32).to(bench.device)
    for _ in range(20):
        times = random_times(rng, num_ranks)
        rows[:, TIME] = torch.from_numpy(times)
        given = rows.to(bench.device)
        plan(given[:, HEADER_WIDTH:], 0, 0, new_status(bench.device), rows=given, outcome=told)
        found = unpack_outcome(told.cpu().numpy()[None], num_ranks, num_ranks, 0)
        assert found.speed[0].tolist() == measured_speeds(times).tolist()
