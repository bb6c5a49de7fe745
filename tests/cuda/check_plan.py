"""plan on the device against the CPU planner, bit for bit."""

import numpy as np
import torch
from ultraep_kernels.contract import FULL_SPEED
from ultraep_kernels.device.plan import Gate
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.host.speeds import full_speeds

from tests.support.bench import Bench
from tests.support.cases import cases, few_attempts
from tests.support.ids import zipf_loads
from tests.support.interpreter import INTERPRETED
from tests.support.kernel_checks import check_plan, identity_plan, plan, require_same_plan
from ultraep_serve.costs.model import IntegerCosts, Transfer, saved_picoseconds, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import Decision, ExpertShape

SMALL = [
    ExpertShape(2, 8, 2),
    ExpertShape(4, 4, 1),  # one expert per rank
    ExpertShape(5, 35, 1),  # L = 7 is prime
    ExpertShape(8, 32, 4),
]
LARGE = [
    ExpertShape(8, 128, 1),  # more masters than are added at a time
    ExpertShape(72, 288, 2),  # as many ranks as there are, and no power of two
    *([] if INTERPRETED else [ExpertShape(72, 504, 4)]),  # slow; the emulated GPU executes as large
]


@cases(
    "shape, exponent, assignments",
    [
        (ExpertShape(1, 8, 2), 1.0, 99),
        *((shape, exponent, 500) for shape in SMALL for exponent in (0.0, 1.2, 2.5)),
    ],
)
def test_shapes(bench: Bench, shape: ExpertShape, exponent: float, assignments: int) -> None:
    loads = zipf_loads(shape, exponent, 1, assignments)
    check_plan(bench, loads, shape, source=shape.num_ranks - 1)


@few_attempts()
@cases("shape", LARGE)
def test_large_shapes(bench: Bench, shape: ExpertShape) -> None:
    check_plan(bench, zipf_loads(shape, 0.9, 1, 65536), shape, source=shape.num_ranks - 1)


@few_attempts()
@cases("num_ranks", [56] if INTERPRETED else [56, 64])
def test_as_many_experts_as_there_are(bench: Bench, num_ranks: int) -> None:
    """896, 16 per token: L is 16 and 14."""
    shape = ExpertShape(num_ranks, 896, 2)
    check_plan(bench, zipf_loads(shape, 0.9, 2, assignments=16384), shape, source=3)


@few_attempts()
def test_what_cannot_be_balanced_takes_the_second_wave(bench: Bench) -> None:
    """Hot ranks of many even experts and one slot: no one expert carries the excess."""
    rng = np.random.default_rng(2)
    shape = ExpertShape(4, 28, 1)
    weight = np.repeat(rng.uniform(0.3, 2, 4), 7) * rng.uniform(0.6, 1.4, 28)
    check_plan(bench, rng.multinomial(4000, weight / weight.sum(), size=4), shape)


@few_attempts()
@cases("domain_size", [1, 2, 3, 4])
def test_domains(bench: Bench, domain_size: int) -> None:
    """Of 8 ranks; the last of three domains of 3 is smaller."""
    shape = ExpertShape(8, 32, 2)
    check_plan(bench, zipf_loads(shape, 1.0, 5, 1000), shape, 5, domain_size)


@cases(
    "shape, domain_size, slowest",
    [
        (ExpertShape(4, 28, 1), None, 400),
        (ExpertShape(8, 32, 2), 3, 400),
        (ExpertShape(5, 5, 2), None, 1),  # one expert per rank; parts of assignments count
    ],
)
def test_speeds(bench: Bench, shape: ExpertShape, domain_size: int | None, slowest: int) -> None:
    rng = np.random.default_rng(1)
    for fastest in (1024, 700):
        speeds = rng.integers(slowest, fastest, size=shape.num_ranks)
        check_plan(bench, zipf_loads(shape, 0.9, 5, 2000), shape, 2, domain_size, speeds)
    equal = np.full(shape.num_ranks, 300)
    check_plan(bench, zipf_loads(shape, 0.9, 6, 2000), shape, 2, domain_size, equal)


EDGES = {
    "no tokens": np.zeros((4, 16), np.int64),
    "balanced": np.full((4, 16), 9),
    "one expert": np.tile(1000 * (np.arange(16) == 5), (4, 1)),
    "one token": np.where(np.arange(64) == 16 + 7, 1, 0).reshape(4, 16),
    "most": zipf_loads(ExpertShape(4, 16, 2), 1.5, 0, 1 << 26),  # together the most it counts
}


@few_attempts()
@cases("num_slots", [0, 2])
@cases("edge", EDGES)
def test_edges(bench: Bench, edge: str, num_slots: int) -> None:
    check_plan(bench, EDGES[edge], ExpertShape(4, 16, num_slots), source=1)


@cases(
    "loads, slow",
    [
        ([[-1, 0, 2, 3], [9, 9, 9, 9]], 1024),
        ([[1 << 28, 1, 0, 0], [0] * 4], 1024),
        ([[-1] * 4, [-1] * 4], 1024),
        ([[1, 1, 1 << 27, 0], [0] * 4], 500),  # takes rank 1 too long
    ],
)
def test_impossible_loads_give_the_identity(
    bench: Bench, loads: list[list[int]], slow: int
) -> None:
    status = new_status(bench.device)
    speeds = torch.tensor([1024, slow], dtype=torch.int32, device=bench.device)
    found = plan(torch.tensor(loads, device=bench.device), 1, 1, status, speeds=speeds)
    assert status.item() == DeviceStatus.IMPOSSIBLE_LOADS
    assert found.decision.item() == Decision.INCONSISTENT
    assert found.slot_expert.tolist() == [[-1], [-1]]
    own = loads[1]
    assert found.share.tolist() == [[own[0], 0], [own[1], 0], [0, own[2]], [0, own[3]]]


def expected_decision(
    loads: np.ndarray, shape: ExpertShape, gate: Gate, domain: int, speeds: np.ndarray
) -> Decision:
    """What the balancer decides on the host."""
    context = PlanContext.of(shape, domain, speeds)
    load = context.rank_loads(loads)
    before = context.busiest_time(load)
    if before * speeds.sum() * 10**6 <= gate.max_imbalance * load.sum() * FULL_SPEED:
        return Decision.BALANCED
    costs = IntegerCosts(
        per_assignment=gate.per_assignment,
        per_expert_read=gate.per_read,
        per_expert_sent=gate.per_sent,
        per_relay_hop=0,
        exchange=0,
        plan=0,
    )
    found = plan_quota(loads, context, 0)
    hoped = context.least_time(load), Transfer(1, 1)
    after = context.busiest_time(found.quota.sum(0))
    planned = after, transfer_of(found.slot_expert, shape.num_masters)
    for time, transfer in (hoped, planned):
        if saved_picoseconds(int(before), int(time), shape, transfer, costs) <= 0:
            return Decision.UNPROFITABLE
    return Decision.PLANNED


@few_attempts()
@cases(
    "gate, exponent, slow, decision",
    [
        (Gate(), 1.0, 1024, Decision.PLANNED),
        (Gate(), 0.0, 1024, None),  # nearly balanced: whatever the host decides
        (Gate(1_200_000), 0.0, 1024, Decision.BALANCED),
        (Gate(1_200_000), 0.0, 500, Decision.PLANNED),  # balanced but for one slow rank
        (Gate(5_000_000), 1.0, 500, Decision.BALANCED),
        (Gate(1_020_000, 1000, 0, 10_000), 1.0, 1024, Decision.PLANNED),
        (Gate(1_020_000, 1000, 0, 10_000), 1.0, 500, Decision.PLANNED),
        # A copy, and reading weights that cost too much.
        (Gate(1_020_000, 1000, 0, 100_000), 1.0, 1024, Decision.UNPROFITABLE),
        (Gate(1_020_000, 1000, 200_000, 0), 1.0, 1024, Decision.UNPROFITABLE),
    ],
)
def test_a_plan_that_does_not_pay_is_not_followed(
    bench: Bench, gate: Gate, exponent: float, slow: int, decision: Decision | None
) -> None:
    """Rank 3 has speed ``slow``."""
    shape, domain = ExpertShape(8, 32, 2), 4
    speeds = full_speeds(shape.num_ranks)
    speeds[3] = slow
    loads = zipf_loads(shape, exponent, 4, 100)
    on_device, status = torch.from_numpy(loads).to(bench.device), new_status(bench.device)
    fast = torch.from_numpy(speeds).int().to(bench.device)
    found = plan(on_device, 2, 0, status, domain_size=domain, speeds=fast, gate=gate)
    expected = expected_decision(loads, shape, gate, domain, speeds)
    assert found.decision.item() == expected
    assert decision in (None, expected)
    followed = plan_quota(loads, PlanContext.of(shape, domain, speeds), 0)
    if expected is not Decision.PLANNED:
        followed = identity_plan(loads, shape, 0)
    require_same_plan(found, followed)


@cases("num_slots, domain_size", [(0, None), (2, 1)])
def test_where_nothing_can_be_copied_a_gate_is_not_passed(
    bench: Bench, num_slots: int, domain_size: int | None
) -> None:
    loads = zipf_loads(ExpertShape(4, 16, num_slots), 1.0, 4, 100)
    on_device, status = torch.from_numpy(loads).to(bench.device), new_status(bench.device)
    found = plan(on_device, num_slots, 0, status, domain_size=domain_size, gate=Gate())
    assert found.decision.item() == Decision.UNPROFITABLE
    require_same_plan(found, identity_plan(loads, ExpertShape(4, 16, num_slots), 0))
