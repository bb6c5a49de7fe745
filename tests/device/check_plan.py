"""plan on the device against the CPU planner, bit for bit (run by test_interpreted)."""

import numpy as np
import pytest
import torch
from ultraep_kernels.device.outcome import pack_outcome, unpack_outcome
from ultraep_kernels.device.plan import Gate, plan
from ultraep_kernels.device.row import (
    CHECKSUM,
    HEADER_WIDTH,
    UNKNOWN,
    row_reference,
    write_row,
)
from ultraep_kernels.device.status import DeviceStatus, new_status

from ultraep_serve.costs.decide import Transfer, saved_picoseconds, transfer_of
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.policies.quota import identity_plan, plan_quota
from ultraep_serve.types import Decision, ExpertShape, Policy, imbalance


def zipf_loads(shape: ExpertShape, exponent: float, seed: int, assignments: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    experts = shape.num_logical_experts
    weight = rng.permutation(1.0 / np.arange(1, experts + 1) ** exponent)
    return rng.multinomial(assignments, weight / weight.sum(), size=shape.num_ranks)


def assert_same_plan(
    loads: np.ndarray, shape: ExpertShape, source: int = 0, domain_size: int | None = None
) -> None:
    status = new_status("cpu")
    arguments = torch.from_numpy(loads.astype(np.int32)), shape.num_replica_slots, source, status
    found = plan(*arguments, domain_size=domain_size)
    expected = plan_quota(loads, shape, source, domain_size=domain_size)
    assert np.array_equal(found.slot_expert.numpy(), expected.slot_expert)
    assert np.array_equal(found.quota.numpy(), expected.quota)
    assert np.array_equal(found.share.numpy(), expected.share)
    assert found.decision.item() == Decision.PLANNED
    assert status.item() == DeviceStatus.OK


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.2, 2.5])
@pytest.mark.parametrize(
    "shape",
    [
        ExpertShape(2, 8, 2),
        ExpertShape(4, 4, 1),  # one expert per rank
        ExpertShape(5, 35, 1),  # L = 7 is prime
        ExpertShape(8, 32, 4),
    ],
    ids=str,
)
def test_small_shapes(shape: ExpertShape, exponent: float) -> None:
    loads = zipf_loads(shape, exponent, 1, assignments=500)
    assert_same_plan(loads, shape, source=shape.num_ranks - 1)


@pytest.mark.parametrize(
    ("shape", "exponent"),
    [
        (ExpertShape(8, 128, 1), 0.9),
        (ExpertShape(64, 256, 2), 0.9),
        (ExpertShape(72, 504, 2), 0.6),
        (ExpertShape(64, 512, 4), 1.2),
    ],
    ids=str,
)
def test_shapes_of_real_models(shape: ExpertShape, exponent: float) -> None:
    assert_same_plan(zipf_loads(shape, exponent, 2, assignments=65536), shape, source=3)


@pytest.mark.parametrize("seed", [2])
def test_what_cannot_be_balanced_takes_the_second_wave(seed: int) -> None:
    """Hot ranks of many even experts and one slot: no one expert carries the excess."""
    rng = np.random.default_rng(seed)
    shape = ExpertShape(4, 28, 1)
    weight = np.repeat(rng.uniform(0.3, 2, 4), 7) * rng.uniform(0.6, 1.4, 28)
    assert_same_plan(rng.multinomial(4000, weight / weight.sum(), size=4), shape)


@pytest.mark.parametrize("domain_size", [1, 2, 3, 4])
def test_domains(domain_size: int) -> None:
    """Of 8 ranks; the last of three domains of 3 is smaller."""
    shape = ExpertShape(8, 32, 2)
    assert_same_plan(zipf_loads(shape, 1.0, 5, 1000), shape, 5, domain_size)


def test_edges() -> None:
    one_hot = np.zeros((4, 16), np.int64)
    one_hot[:, 5] = 1000
    few = np.zeros((4, 16), np.int64)
    few[1, 7] = 1
    for loads in (np.zeros((4, 16), np.int64), np.full((4, 16), 9), one_hot, few):
        for num_slots in (0, 2):
            assert_same_plan(loads, ExpertShape(4, 16, num_slots), source=1)
    assert_same_plan(zipf_loads(ExpertShape(1, 8, 2), 1.0, 0, 99), ExpertShape(1, 8, 2))
    large = zipf_loads(ExpertShape(4, 16, 2), 1.5, 0, 1 << 26)  # together the most it counts
    assert_same_plan(large, ExpertShape(4, 16, 2))


@pytest.mark.parametrize("loads", [[[-1, 0, 2, 3], [9, 9, 9, 9]], [[1 << 28, 1, 0, 0], [0] * 4]])
def test_impossible_loads_give_the_identity(loads: list[list[int]]) -> None:
    status = new_status("cpu")
    found = plan(torch.tensor(loads), 1, 1, status)
    assert status.item() == DeviceStatus.IMPOSSIBLE_LOADS
    assert found.decision.item() == Decision.DOUBT
    assert found.slot_expert.tolist() == [[-1], [-1]]
    own = loads[1]
    assert found.share.tolist() == [[own[0], 0], [own[1], 0], [0, own[2]], [0, own[3]]]


def rows_of(loads: np.ndarray, policy: Policy, threshold: int = 0) -> torch.Tensor:
    """(R, W) int32 as ranks with tokens of their own exchange them; only rank 0's choice counts."""
    rows = []
    for rank, load in enumerate(loads):
        code = policy.code if rank == 0 else Policy.EPLB.code
        choice = torch.tensor([code, threshold if rank == 0 else 9_000_000], dtype=torch.int32)
        unknown = torch.zeros(1, dtype=torch.int32)
        rows.append(write_row(torch.from_numpy(load).int(), unknown, choice, has_load=True))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("policy", "threshold", "decision"),
    [
        (Policy.QUOTA, 0, Decision.PLANNED),
        (Policy.QUOTA, 8_000_000, Decision.BALANCED),
        (Policy.QUOTA, 999_999, Decision.PLANNED),  # below 1: as configured
        (Policy.OFF, 0, Decision.POLICY_OFF),
        (Policy.EPLB, 0, Decision.POLICY_OFF),  # not offered
        (Policy.IDEAL, 0, Decision.FORCED),
    ],
)
def test_rank_0_says_in_its_row_what_all_do(
    policy: Policy, threshold: int, decision: Decision
) -> None:
    """Loads are read where the exchange left them, behind the headers."""
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows, status = rows_of(loads, policy, threshold), new_status("cpu")
    found = plan(rows[:, HEADER_WIDTH:], 1, 2, status, gate=Gate(1.02), rows=rows)
    assert found.decision.item() == decision
    expected = plan_quota(loads, shape, 2)
    if decision is not Decision.PLANNED:
        expected = identity_plan(loads, shape, 2)
    for name in ("slot_expert", "quota", "share"):
        assert np.array_equal(getattr(found, name).numpy(), getattr(expected, name))
    assert found.expert_load.tolist() == loads.sum(0).tolist()
    outcome = unpack_outcome(pack_outcome(found, rows).numpy(), 16, 4, 1)
    assert (outcome.decision, outcome.policy) == (decision, policy.code)
    assert np.array_equal(outcome.expert_load, loads.sum(0))
    assert np.array_equal(outcome.slot_expert, expected.slot_expert)
    slot_load = expected.quota[expected.slot_expert, np.arange(4)[:, None]]
    assert np.array_equal(outcome.slot_load, np.where(expected.slot_expert < 0, 0, slot_load))


@pytest.mark.parametrize("column", [UNKNOWN, CHECKSUM])
def test_a_header_that_is_in_doubt_leaves_every_rank_alone(column: int) -> None:
    shape = ExpertShape(4, 16, 1)
    loads = zipf_loads(shape, 1.0, 3, 400)
    rows = rows_of(loads, Policy.IDEAL)
    rows[3, column] = 9
    found = plan(rows[:, HEADER_WIDTH:], 1, 2, new_status("cpu"), rows=rows)
    assert found.decision.item() == Decision.DOUBT
    assert np.array_equal(found.share.numpy(), identity_plan(loads, shape, 2).share)


def test_rows_that_may_never_have_come_are_in_doubt() -> None:
    loads = zipf_loads(ExpertShape(2, 8, 1), 1.0, 3, 400)
    rows, status = rows_of(loads, Policy.QUOTA), new_status("cpu")
    status[0] = int(DeviceStatus.SLOT_TIMEOUT)
    found = plan(rows[:, HEADER_WIDTH:], 1, 0, status, rows=rows)
    assert found.decision.item() == Decision.DOUBT


@pytest.mark.parametrize("experts", [5, 32, 300])
@pytest.mark.parametrize("has_load", [True, False])
def test_row_equals_its_twin(experts: int, has_load: bool) -> None:
    load = torch.arange(experts, dtype=torch.int32) * 1_000_003
    arguments = load, torch.tensor([7], dtype=torch.int32), torch.tensor([1, 1_020_000]).int()
    row = write_row(*arguments, has_load)
    assert torch.equal(row, row_reference(*arguments, has_load))
    load[1], load[3] = load[3].clone(), load[1].clone()  # the same sum
    other = write_row(*arguments, has_load)
    assert torch.equal(row[CHECKSUM], other[CHECKSUM]) == has_load


def expected_decision(loads: np.ndarray, shape: ExpertShape, gate: Gate, domain: int) -> Decision:
    """What the balancer decides on the host."""
    before = loads.sum(0).reshape(shape.num_ranks, -1).sum(1)
    if imbalance(before) <= gate.max_imbalance:
        return Decision.BALANCED
    costs = IntegerCosts(
        per_assignment=gate.per_assignment,
        per_expert_read=gate.per_expert_read,
        per_expert_sent=gate.per_expert_sent,
        per_relay_hop=0,
        exchange=0,
        plan=gate.plan,
    )
    found = plan_quota(loads, shape, 0, domain_size=domain)
    hoped = -(-before.sum() // before.size), Transfer(1, 1)
    planned = found.quota.sum(0).max(), transfer_of(found.slot_expert, shape.num_masters)
    for after, transfer in (hoped, planned):
        if saved_picoseconds(int(before.max()), int(after), shape, transfer, costs) <= 0:
            return Decision.UNPROFITABLE
    return Decision.PLANNED


@pytest.mark.parametrize(
    ("gate", "exponent", "decision"),
    [
        (Gate(), 1.0, Decision.PLANNED),
        (Gate(), 0.0, None),  # nearly balanced: whatever the host decides
        (Gate(max_imbalance=5.0), 1.0, Decision.BALANCED),
        (Gate(1.02, 1000, 0, 10_000, 5_000), 1.0, Decision.PLANNED),
        (Gate(1.02, 1000, 0, 10_000, 5_000_000), 1.0, Decision.UNPROFITABLE),  # planning is dear
        (Gate(1.02, 1000, 0, 100_000, 0), 1.0, Decision.UNPROFITABLE),  # one send would pay
        (Gate(1.02, 1000, 200_000, 0, 0), 1.0, Decision.UNPROFITABLE),  # reading weights takes all
    ],
)
def test_a_plan_that_does_not_pay_is_not_followed(
    gate: Gate, exponent: float, decision: Decision | None
) -> None:
    shape, domain = ExpertShape(8, 32, 2), 4
    loads = zipf_loads(shape, exponent, 4, 100)
    found = plan(torch.from_numpy(loads), 2, 0, new_status("cpu"), domain_size=domain, gate=gate)
    expected = expected_decision(loads, shape, gate, domain)
    assert found.decision.item() == expected
    assert decision in (None, expected)
    followed = plan_quota(loads, shape, 0, domain_size=domain)
    if expected is not Decision.PLANNED:
        followed = identity_plan(loads, shape, 0)
    for name in ("slot_expert", "quota", "share"):
        assert np.array_equal(getattr(found, name).numpy(), getattr(followed, name))
