"""Compiled plans of a rack, and what of batches and mistakes ``kernels.check`` does not show."""

from contextlib import closing

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("pydantic", reason="BalanceConfig needs it")

import numpy as np
import torch
import triton.language as tl
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH, POLICY, Policy, Prices
from ultraep_kernels.device.outcome import outcome_width
from ultraep_kernels.device.plan import Gate, Given, Planner, Rows, Sender, new_states, plan_sizes
from ultraep_kernels.device.status import new_status

from tests.emulated_gpu.kernels.compiled import Prepared, inline_assembly, prepare
from tests.emulated_gpu.kernels.machine import Machine, Options
from tests.emulated_gpu.kernels.scenarios import SCENARIOS, play
from tests.support.ids import zipf_loads
from tests.support.kernel_checks import no_ids, plan, require_same_plan
from tests.support.offline import recorded_launches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

pytestmark = pytest.mark.interpreter


def executed(prepared: Prepared) -> int:
    """Instructions of the longest warp, where nothing is wrong."""
    machine = Machine(1, Options(seed=1, resident=200))
    with closing(machine):
        stores = {each.untyped_storage() for each in prepared.tensors}
        for start, size in {(store.data_ptr(), store.nbytes()) for store in stores}:
            if size:
                machine.add_memory(start, size, 0, machine.new_cells(size))
        machine.begin(prepared.grid)
        number = machine.launch(prepared, 0, [])
        machine.run()
        assert machine.findings() == []
        return machine.longest_warp(number)


@pytest.mark.parametrize("num_experts", [288, 504])
def test_plans_for_72_ranks_are_those_of_a_cpu(num_experts: int) -> None:
    """No power of two; with as many attempts as in a server."""
    shape = ExpertShape(72, num_experts, 2)
    loads = zipf_loads(shape, 0.9, 2, assignments=65536)
    with recorded_launches() as launches:
        found = plan(torch.from_numpy(loads).int(), 2, 3, new_status("cpu"))
    executed(prepare(launches[0]))
    require_same_plan(found, plan_quota(loads, PlanContext.of(shape), 3))
    assert int((found.slot_expert >= 0).sum()) > 20


def longest_warps(loads: np.ndarray, num_slots: int, *, keeps: bool) -> list[int]:
    """Instructions of the longest warp of two plans of the same ``loads`` (R, E)."""
    num_ranks, num_experts = loads.shape
    rows = torch.zeros((num_ranks, HEADER_WIDTH + num_experts), dtype=torch.int32)
    rows[:, HEADER_WIDTH:] = torch.from_numpy(loads)
    rows[:, POLICY] = Policy.QUOTA.code
    loads_of_rows, status = Rows.of(rows[:, HEADER_WIDTH:]), new_status("cpu")
    given = Given(loads_of_rows, status, Rows.of(rows), gate=Gate(1_020_000))
    planner = Planner(
        plan_sizes(num_ranks, num_experts, num_slots, keeps=keeps),
        given,
        Sender(0),
        prices=Prices(copy=1000 * FULL_SPEED),  # as computing 1000 assignments
    )
    sizes = num_experts, num_ranks, num_slots
    (state,) = new_states(1, *sizes, torch.device("cpu"))
    outcome = torch.zeros(outcome_width(*sizes), dtype=torch.int32)
    ids, count = no_ids(rows[:, HEADER_WIDTH:])
    found = []
    for _ in range(2):
        with recorded_launches() as launches:
            planner(ids, ids, count, outcome, state if keeps else None)
        found.append(executed(prepare(launches[0])))
    return found


@pytest.mark.parametrize("num_ranks", [8, 16])
def test_a_plan_that_finds_its_copies_takes_little_longer(num_ranks: int) -> None:
    shape = ExpertShape(num_ranks, 128, 2)
    loads = zipf_loads(shape, 0.6, 2, assignments=65536)
    plans = [longest_warps(loads, shape.num_slots, keeps=keeps) for keeps in (False, True)]
    (fresh, _), (grown, stayed) = plans
    assert stayed <= 1.1 * fresh
    assert grown <= 1.8 * fresh


def test_signals_are_tritons_own_where_it_has_them() -> None:
    """Its sanitizer of global memory does not see what inline assembly loads and stores."""
    if not hasattr(tl, "atomic_load"):
        pytest.skip("this Triton has no atomic loads")
    scenario = SCENARIOS["relays expected to be left alone"]
    assert play(scenario, scenario.options_of(1)).is_right
    orders = {"fence.acq_rel.sys", "fence.proxy.alias"}
    assert inline_assembly() == orders | {"trap", "nanosleep.u32", "mov.u32", "mov.u64"}
