"""Compiled plans of a rack, and what of batches and mistakes ``kernels.check`` does not show."""

from contextlib import closing

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("pydantic", reason="BalanceConfig needs it")

import torch
import triton.language as tl
from ultraep_kernels.device.status import new_status

from tests.emulated_gpu.kernels.compiled import inline_assembly, prepare
from tests.emulated_gpu.kernels.machine import Machine, Options
from tests.emulated_gpu.kernels.mistakes import MISTAKES
from tests.emulated_gpu.kernels.scenarios import SCENARIOS, play
from tests.support.ids import zipf_loads
from tests.support.kernel_checks import plan, require_same_plan
from tests.support.offline import recorded_launches
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("num_experts", [288, 504])
def test_plans_for_72_ranks_are_those_of_a_cpu(num_experts: int) -> None:
    """No power of two; with as many attempts as in a server."""
    shape = ExpertShape(72, num_experts, 2)
    loads = zipf_loads(shape, 0.9, 2, assignments=65536)
    with recorded_launches() as launches:
        found = plan(torch.from_numpy(loads).int(), 2, 3, new_status("cpu"))
    prepared, machine = prepare(launches[0]), Machine(1, Options(seed=1, resident=200))
    with closing(machine):
        for start, size in {(each.data_ptr(), each.nbytes) for each in prepared.tensors}:
            if size:
                machine.add_memory(start, size, 0, machine.new_cells(size))
        machine.begin(prepared.grid)
        machine.launch(prepared, 0, [])
        machine.run()
        assert machine.findings() == []
    require_same_plan(found, plan_quota(loads, PlanContext.of(shape), 3))
    assert int((found.slot_expert >= 0).sum()) > 20


def test_there_are_enough_mistakes_of_every_kind() -> None:
    assert len(MISTAKES) >= 20
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
    changed = {mistake.target.operation for mistake in MISTAKES if mistake.target}
    assert changed == {"barrier", "fence", "fence_alias", "store", "load", "atom", "trap"}
    assert {mistake.scenario for mistake in MISTAKES} <= set(SCENARIOS)


def test_signals_are_tritons_own_where_it_has_them() -> None:
    """Its sanitizer of global memory does not see what inline assembly loads and stores."""
    if not hasattr(tl, "atomic_load"):
        pytest.skip("this Triton has no atomic loads")
    scenario = SCENARIOS["relays expected to be left alone"]
    assert play(scenario, scenario.options_of(1)).is_right
    orders = {"fence.acq_rel.sys", "fence.proxy.alias"}
    assert inline_assembly() == orders | {"trap", "nanosleep.u32", "mov.u32", "mov.u64"}
