"""What ranks tell each other in a row, and what the plan makes of it."""

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import CHECKSUM, HEADER_WIDTH, UNKNOWN
from ultraep_kernels.device.exchange import row_reference, write_row
from ultraep_kernels.device.outcome import pack_outcome, unpack_outcome
from ultraep_kernels.device.plan import Gate, plan
from ultraep_kernels.device.status import DeviceStatus, new_status

from tests.support.bench import Bench
from tests.support.ids import zipf_loads
from tests.support.kernel_checks import require_equal, require_same_plan
from ultraep_serve.planner.quota import identity_plan, plan_quota
from ultraep_serve.types import Decision, ExpertShape, Policy

pytestmark = pytest.mark.usefixtures("few_attempts")


def rows_of(bench: Bench, loads: np.ndarray, policy: Policy, threshold: int = 0) -> torch.Tensor:
    """(R, W) int32 as ranks with tokens of their own exchange them; only rank 0's choice counts."""
    rows = []
    for rank, load in enumerate(loads):
        code = policy.code if rank == 0 else Policy.EPLB_SLOTS.code
        given = load, [0], [code, threshold if rank == 0 else 9_000_000, 0, 0]
        arguments = (torch.as_tensor(values).int().to(bench.device) for values in given)
        rows.append(write_row(*arguments, has_load=True))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("policy", "threshold", "decision"),
    [
        (Policy.QUOTA, 0, Decision.PLANNED),
        (Policy.QUOTA, 8_000_000, Decision.BALANCED),
        (Policy.QUOTA, 999_999, Decision.PLANNED),  # below 1: as configured
        (Policy.OFF, 0, Decision.POLICY_OFF),
        (Policy.EPLB_SLOTS, 0, Decision.POLICY_OFF),  # not offered
        (Policy.IDEAL, 0, Decision.FORCED),
    ],
)
def test_rank_0_says_in_its_row_what_all_do(
    bench: Bench, policy: Policy, threshold: int, decision: Decision
) -> None:
    """Loads are read where the exchange left them, behind the headers."""
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows, status = rows_of(bench, loads, policy, threshold), new_status(bench.device)
    found = plan(rows[:, HEADER_WIDTH:], 1, 2, status, gate=Gate(1.02), rows=rows)
    assert found.decision.item() == decision
    expected = plan_quota(loads, shape, 2)
    if decision is not Decision.PLANNED:
        expected = identity_plan(loads, shape, 2)
    require_same_plan(found, expected)
    assert found.expert_load.tolist() == loads.sum(0).tolist()
    speeds = torch.arange(4, dtype=torch.int32, device=bench.device)
    outcome = unpack_outcome(pack_outcome(found, rows, speeds).cpu().numpy(), 16, 4, 1)
    assert (outcome.decision, outcome.policy) == (decision, policy.code)
    assert outcome.speeds.tolist() == [0, 1, 2, 3]
    assert np.array_equal(outcome.expert_load, loads.sum(0))
    assert np.array_equal(outcome.slot_expert, expected.slot_expert)
    slot_load = expected.quota[expected.slot_expert, np.arange(4)[:, None]]
    assert np.array_equal(outcome.slot_load, np.where(expected.slot_expert < 0, 0, slot_load))


@pytest.mark.parametrize("column", [UNKNOWN, CHECKSUM])
def test_a_header_that_is_inconsistent_leaves_every_rank_alone(bench: Bench, column: int) -> None:
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows = rows_of(bench, loads, Policy.IDEAL)
    rows[3, column] = 9
    found = plan(rows[:, HEADER_WIDTH:], 1, 2, new_status(bench.device), rows=rows)
    assert found.decision.item() == Decision.INCONSISTENT
    require_same_plan(found, identity_plan(loads, shape, 2))


def test_rows_that_may_never_have_come_are_inconsistent(bench: Bench) -> None:
    loads = zipf_loads(ExpertShape(2, 8, 1), 1.0, 3, 400)
    rows, status = rows_of(bench, loads, Policy.QUOTA), new_status(bench.device)
    status[0] = int(DeviceStatus.SLOT_TIMEOUT)
    found = plan(rows[:, HEADER_WIDTH:], 1, 0, status, rows=rows)
    assert found.decision.item() == Decision.INCONSISTENT


@pytest.mark.parametrize("experts", [5, 32, 896])
@pytest.mark.parametrize("has_load", [True, False])
def test_row_equals_its_twin(bench: Bench, experts: int, has_load: bool) -> None:
    load = torch.arange(experts, dtype=torch.int32, device=bench.device) * 1_000_003
    given = torch.tensor([7, 1, 1_020_000, 2, 17_000_000], dtype=torch.int32, device=bench.device)
    arguments = load, given[:1], given[1:]
    row = write_row(*arguments, has_load)
    require_equal(row, row_reference(*arguments, has_load), "row")
    load[1], load[3] = load[3].clone(), load[1].clone()  # the same sum
    other = write_row(*arguments, has_load)
    assert torch.equal(row[CHECKSUM], other[CHECKSUM]) == has_load
