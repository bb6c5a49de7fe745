"""Compiled plans of a rack, and what of batches and mistakes ``kernels.check`` does not show."""

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("pydantic", reason="BalanceConfig needs it")

import torch
import triton.language as tl
from ultraep_kernels.device.status import new_status

from tests.emulated_gpu.kernels.compiled import inline_assembly, prepare
from tests.emulated_gpu.kernels.lengths import executed, longest_warps
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
    executed(prepare(launches[0]))
    require_same_plan(found, plan_quota(loads, PlanContext.of(shape), 3))
    assert int((found.slot_expert >= 0).sum()) > 20


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
