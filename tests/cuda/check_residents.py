"""plan on the device where copies stay, batch after batch, against the CPU's, bit for bit."""

import numpy as np
import torch
from ultraep_kernels.contract import FORGET, HEADER_WIDTH, POLICY, Policy
from ultraep_kernels.device._plan_residents import RESIDENTS
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.outcome import outcome_width, unpack_outcome
from ultraep_kernels.device.plan import Gate, Given, Planner, Rows, Sender, new_states, plan_sizes
from ultraep_kernels.device.status import new_status

from tests.support.bench import Bench
from tests.support.cases import cases, few_attempts
from tests.support.interpreter import INTERPRETED
from tests.support.kernel_checks import identity_plan, require_equal, require_ok, require_same_plan
from ultraep_serve.costs.model import IntegerCosts, saved_picoseconds, transfer_of
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.residents import Residents, prices_of
from ultraep_serve.types import Decision, ExpertShape, Plan

LAYER, SOURCE = 3, 1
FREE = IntegerCosts(1, 0, 0, 0, 0, 0)


class Layer:
    """One layer of all ranks on the device and on the CPU."""

    def __init__(
        self,
        bench: Bench,
        shape: ExpertShape,
        costs: IntegerCosts = FREE,
        domain_size: int | None = None,
        speeds: np.ndarray | None = None,
    ) -> None:
        self._context, self._costs = PlanContext.of(shape, domain_size, speeds), costs
        ranks, experts, slots = shape.num_ranks, shape.num_logical_experts, shape.num_replica_slots
        self._rows = torch.zeros((ranks, HEADER_WIDTH + experts), dtype=torch.int32)
        self._on_device = self._rows.to(bench.device)
        self._status = new_status(bench.device)
        self.residents, self.prices = Residents(shape, LAYER), prices_of(costs, shape)
        self.state = new_states(LAYER + 1, experts, ranks, slots, bench.device)[LAYER]
        fast = None if speeds is None else torch.from_numpy(speeds).int().to(bench.device)
        given = Rows.of(self._on_device[:, HEADER_WIDTH:]), self._status, Rows.of(self._on_device)
        gate = Gate(1_020_000, costs.per_assignment, costs.per_expert_read, costs.per_expert_sent)
        self._planner = Planner(
            plan_sizes(ranks, experts, slots, domain_size, keeps=True),
            Given(*given, fast, gate),
            Sender(SOURCE),
            prices=self.prices,
        )
        self._width = outcome_width(experts, ranks, slots)
        self._nothing = torch.zeros(0, dtype=torch.int32, device=bench.device)
        self._count = Count(experts, bench.device)

    def batch(
        self, loads: np.ndarray, changes: int = 0, policy: Policy = Policy.QUOTA
    ) -> tuple[Decision, Plan]:
        """Plan a batch on both, compare, and return the CPU's."""
        self._rows[:, HEADER_WIDTH:] = torch.from_numpy(loads)
        self._rows[0, POLICY], self._rows[-1, FORGET] = policy.code, changes
        self._on_device.copy_(self._rows)
        outcome = self._nothing.new_zeros(self._width)
        self._planner(self._nothing, self._nothing, self._count, outcome, self.state)
        decision, plan = self._expected(loads.astype(np.int64), changes, policy)
        found, shape = self._planner.found, self._context.shape
        assert found.decision.item() == decision, (Decision(found.decision.item()), decision)
        require_same_plan(found, plan)
        require_equal(found.copied, plan.copied, "copied")
        require_ok(self._status)
        sizes = shape.num_logical_experts, shape.num_ranks, shape.num_slots
        told = unpack_outcome(outcome.cpu().numpy()[None], *sizes)
        assert np.array_equal(told.is_copied[0], plan.copied >= 0)
        assert np.array_equal(told.slot_load[0], plan.slot_load)
        places = shape.num_ranks * shape.num_slots
        held = self.state[RESIDENTS.value : RESIDENTS.value + places].view(-1, shape.num_ranks).T
        require_equal(held, self.residents.slot_expert, "residents")
        if self.residents._batches:
            require_equal(self.state[-sizes[0] :], self.residents._average, "average")
        assert self.state[0] == self.residents._batches
        return decision, plan

    def _expected(self, loads: np.ndarray, changes: int, policy: Policy) -> tuple[Decision, Plan]:
        """As ``HostBalancer`` decides."""
        context, costs = self._context, self._costs
        nothing = identity_plan(loads, context.shape, SOURCE)
        self.residents.heed(changes)
        if policy is not Policy.QUOTA:
            return Decision.POLICY_OFF, nothing
        load = context.rank_loads(loads)
        before = context.busiest_time(load)
        if before * context.speeds.sum() * 10**6 <= 1_020_000 * load.sum() * 1024:
            return Decision.BALANCED, nothing
        plan = self.residents.plan(loads, context, SOURCE, self.prices)
        after = int(context.busiest_time(plan.quota.sum(axis=0)))
        transfer = transfer_of(plan.copied, context.shape.num_masters)
        saved = saved_picoseconds(int(before), after, context.shape, transfer, costs)
        if not (plan.copied >= 0).any() and saved <= 0:
            return Decision.UNPROFITABLE, nothing
        self.residents.take(plan)
        return Decision.PLANNED, plan


def drifting(shape: ExpertShape, number: int, seed: int = 1) -> np.ndarray:
    """Loads of two kinds of traffic, both of which change slowly, and of some odd batches."""
    rng = np.random.default_rng(1000 * seed + number)
    experts = shape.num_logical_experts
    weight = 1 / (1 + np.arange(experts)) ** (0.0 if number % 7 == 6 else 0.9)
    weight = np.roll(np.random.default_rng(seed).permutation(weight), 5 * (number // 2 % 2))
    weight = weight * np.exp(rng.normal(0, 0.3, experts))
    return rng.multinomial(600, weight / weight.sum(), size=shape.num_ranks)


CASES = [
    (ExpertShape(2, 8, 2), FREE, None, None),
    (ExpertShape(4, 16, 2), IntegerCosts(1000, 5000, 40_000, 0, 0, 0), None, None),
    (ExpertShape(4, 16, 3), IntegerCosts(1000, 0, 3_000_000, 0, 0, 0), None, (1024, 500, 900, 1)),
    (ExpertShape(6, 18, 2), IntegerCosts(1000, 0, 20_000, 0, 0, 0), 4, None),  # the last is smaller
    (ExpertShape(4, 8, 1), IntegerCosts(1000, 9000, 90_000, 0, 0, 0), 2, (700, 700, 350, 600)),
    *([] if INTERPRETED else [(ExpertShape(72, 288, 2), FREE, None, None)]),
]


@few_attempts()
@cases("shape, costs, domain_size, speeds", CASES)
def test_batches_of_a_layer(
    bench: Bench,
    shape: ExpertShape,
    costs: IntegerCosts,
    domain_size: int | None,
    speeds: tuple[int, ...] | None,
) -> None:
    """Copies are made, kept and replaced; some are forgotten, and where the policy is off none."""
    fast = None if speeds is None else np.array(speeds)
    layer, changes = Layer(bench, shape, costs, domain_size, fast), 0
    found = []
    for number in range(9):
        changes += number in (4, 7)
        policy = Policy.OFF if number in (6, 7) else Policy.QUOTA
        found.append(layer.batch(drifting(shape, number), changes, policy))
    plans = [plan for decision, plan in found if decision is Decision.PLANNED]
    assert any((plan.copied >= 0).any() for plan in plans)
    assert any((plan.slot_expert >= 0).any() and (plan.copied < 0).all() for plan in plans)


def test_a_search_as_it_serves(bench: Bench) -> None:
    shape = ExpertShape(4, 12, 1)
    layer = Layer(bench, shape, IntegerCosts(1000, 0, 1000, 0, 0, 0))
    for number in range(3):
        layer.batch(drifting(shape, 10 * number, seed=2))


EDGES = (np.zeros((4, 16)), np.full((4, 16), 9), np.tile(1000 * (np.arange(16) == 5), (4, 1)))


@few_attempts()
def test_edges(bench: Bench) -> None:
    layer = Layer(bench, ExpertShape(4, 16, 2))
    for number in range(6):
        layer.batch(EDGES[(0, 1, 2)[number % 3]].astype(int))
    most = drifting(ExpertShape(4, 16, 2), 0)
    most = most * ((1 << 28) // most.sum())  # together nearly the most that it counts
    for loads in (most, np.roll(most, 7, axis=1), np.roll(most, 3, axis=1)):
        layer.batch(loads)
