"""What ranks tell each other in a row, and what the plan makes of it."""

import numpy as np
import torch
from ultraep_kernels.contract import CHECKSUM, HEADER_WIDTH, POLICY, TIME, UNKNOWN
from ultraep_kernels.device.count import RowWanted
from ultraep_kernels.device.outcome import outcome_width, unpack_outcome
from ultraep_kernels.device.plan import Gate
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.host.speeds import measured_speeds

from tests.support.bench import Bench
from tests.support.cases import cases, few_attempts
from tests.support.ids import zipf_loads
from tests.support.kernel_checks import (
    count_of,
    identity_plan,
    plan,
    require_equal,
    require_same_plan,
    row_reference,
)
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import Decision, ExpertShape, Policy


def rows_of(bench: Bench, loads: np.ndarray, policy: Policy) -> torch.Tensor:
    """(R, W) int32 as ranks with tokens of their own exchange them; only rank 0's choice counts."""
    rows = []
    for rank, load in enumerate(loads):
        code = policy.code if rank == 0 else Policy.OFF.code
        given = load, [0], [code, 0, 0]
        arguments = (torch.as_tensor(values).int().to(bench.device) for values in given)
        rows.append(row_reference(*arguments, has_load=True))
    return torch.stack(rows)


@few_attempts()
@cases(
    "policy, decision",
    [
        (Policy.QUOTA, Decision.PLANNED),
        (Policy.OFF, Decision.POLICY_OFF),
        (Policy.IDEAL, Decision.FORCED),
    ],
)
def test_rank_0_says_in_its_row_what_all_do(
    bench: Bench, policy: Policy, decision: Decision
) -> None:
    """Loads are read where the exchange left them, behind the headers."""
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows, status = rows_of(bench, loads, policy), new_status(bench.device)
    speeds = torch.full((4,), 512, dtype=torch.int32, device=bench.device)
    told = torch.zeros(outcome_width(16, 4, 1), dtype=torch.int32, device=bench.device)
    found = plan(
        rows[:, HEADER_WIDTH:],
        1,
        2,
        status,
        gate=Gate(1_020_000),
        rows=rows,
        speeds=speeds,
        outcome=told,
    )
    assert found.decision.item() == decision
    expected = plan_quota(loads, PlanContext.of(shape), 2)
    if decision is not Decision.PLANNED:
        expected = identity_plan(loads, shape, 2)
    require_same_plan(found, expected)
    assert found.expert_load.tolist() == loads.sum(0).tolist()
    outcome = unpack_outcome(told.cpu().numpy()[None], 16, 4, 1)
    assert (outcome.decision, outcome.policy) == (decision, policy.code)
    assert outcome.speed.tolist() == [[1024] * 4]  # the fastest is at full speed
    assert np.array_equal(outcome.expert_load[0], loads.sum(0))
    assert np.array_equal(outcome.own_load[0], loads[2])
    assert np.array_equal(outcome.slot_expert[0], expected.slot_expert)
    slot_load = expected.quota[expected.slot_expert, np.arange(4)[:, None]]
    assert np.array_equal(outcome.slot_load[0], np.where(expected.slot_expert < 0, 0, slot_load))


@few_attempts()
@cases("column", [UNKNOWN, CHECKSUM])
def test_a_header_that_is_inconsistent_leaves_every_rank_alone(bench: Bench, column: int) -> None:
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows = rows_of(bench, loads, Policy.IDEAL)
    rows[3, column] = 9
    found = plan(rows[:, HEADER_WIDTH:], 1, 2, new_status(bench.device), rows=rows)
    assert found.decision.item() == Decision.INCONSISTENT
    require_same_plan(found, identity_plan(loads, shape, 2))


@few_attempts()
def test_rows_that_may_never_have_come_are_inconsistent(bench: Bench) -> None:
    loads = zipf_loads(ExpertShape(2, 8, 1), 1.0, 3, 400)
    rows, status = rows_of(bench, loads, Policy.QUOTA), new_status(bench.device)
    status[0] = int(DeviceStatus.SLOT_TIMEOUT)
    found = plan(rows[:, HEADER_WIDTH:], 1, 0, status, rows=rows)
    assert found.decision.item() == Decision.INCONSISTENT


@few_attempts()
@cases("experts", [5, 32, 896])
@cases("has_load", [True, False])
def test_row_equals_its_twin(bench: Bench, experts: int, has_load: bool) -> None:
    load = torch.arange(experts) * 7 % 5
    choice = torch.tensor([1, 17_000_000, 3], dtype=torch.int32, device=bench.device)

    def row_of(load: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(experts).repeat_interleave(load)
        ids = torch.cat([ids, torch.tensor([experts, -1, 1 << 20])]).view(-1, 1).to(bench.device)
        count = count_of(ids, experts, wanted=RowWanted(choice), has_load=has_load)
        count(ids)
        unknown = torch.tensor([2], dtype=torch.int32, device=bench.device)
        twin = row_reference(load.int().to(bench.device), unknown, choice, has_load)
        require_equal(count.row, twin, "row")
        return count.row

    row = row_of(load)
    load[1], load[3] = load[3].clone(), load[1].clone()  # the same sum
    assert torch.equal(row[CHECKSUM], row_of(load)[CHECKSUM]) == has_load


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
