"""plan on the device against the CPU planner, bit for bit (run by test_interpreted)."""

import numpy as np
import pytest
import torch
from ultraep_kernels.device.plan import Gate, plan
from ultraep_kernels.device.status import DeviceStatus, new_status

from ultraep_serve.costs.model import IntegerCosts, Transfer, saved_picoseconds, transfer_of
from ultraep_serve.planner.quota import identity_plan, plan_quota
from ultraep_serve.types import Decision, ExpertShape, imbalance


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


@pytest.mark.parametrize("exponent", [0.0, 1.2, 2.5])
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
        (ExpertShape(8, 128, 1), 0.9),  # more masters than are added at a time
        (ExpertShape(72, 504, 4), 0.9),  # as large as it gets, and no power of two
    ],
    ids=str,
)
def test_shapes_of_real_models(shape: ExpertShape, exponent: float) -> None:
    assert_same_plan(zipf_loads(shape, exponent, 2, assignments=65536), shape, source=3)


@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("seed", [2])
def test_what_cannot_be_balanced_takes_the_second_wave(seed: int) -> None:
    """Hot ranks of many even experts and one slot: no one expert carries the excess."""
    rng = np.random.default_rng(seed)
    shape = ExpertShape(4, 28, 1)
    weight = np.repeat(rng.uniform(0.3, 2, 4), 7) * rng.uniform(0.6, 1.4, 28)
    assert_same_plan(rng.multinomial(4000, weight / weight.sum(), size=4), shape)


@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("domain_size", [1, 2, 3, 4])
def test_domains(domain_size: int) -> None:
    """Of 8 ranks; the last of three domains of 3 is smaller."""
    shape = ExpertShape(8, 32, 2)
    assert_same_plan(zipf_loads(shape, 1.0, 5, 1000), shape, 5, domain_size)


@pytest.mark.usefixtures("few_attempts")
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
    assert found.decision.item() == Decision.INCONSISTENT
    assert found.slot_expert.tolist() == [[-1], [-1]]
    own = loads[1]
    assert found.share.tolist() == [[own[0], 0], [own[1], 0], [0, own[2]], [0, own[3]]]


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


@pytest.mark.usefixtures("few_attempts")
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
