"""Compiled kernels of whole batches, and mistakes in them; ``tests.ptx.check`` does all of it."""

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("pydantic", reason="BalanceConfig needs it")

import triton.language as tl

from tests.ptx.compiled import inline_assembly
from tests.ptx.mistakes import MISTAKES, Mistake, play_with
from tests.ptx.scenarios import SCENARIOS, play

pytestmark = pytest.mark.interpreter


SOME = [mistake for mistake in MISTAKES if mistake.name in (
    "row posted without a release", "slot read without a proxy fence", "plan: no tickets",
    "histogram without its barriers", "slots overwritten a layer early",
)]  # fmt: skip


@pytest.mark.parametrize("name", ["two ranks", "relays"])
def test_the_same_as_on_a_cpu_without_races(name: str) -> None:
    outcome = play(SCENARIOS[name], SCENARIOS[name].options_of(1))
    assert outcome.is_right, outcome
    assert outcome.launches > 0


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


@pytest.mark.parametrize("mistake", SOME, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found(mistake: Mistake) -> None:
    assert not all(play_with(mistake, seed).is_right for seed in range(1, 4))
