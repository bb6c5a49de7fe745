"""Whole balancers on real processes: random batches, poisoned slots, answers compared bitwise."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import run_ranks
from tests.support.stress import RandomBatches, StressReport, TinyMoE, run_stress
from ultraep_serve.config import BalanceConfig
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

VIEWS = list(TokenView)


def make_batches(num_ranks: int, view: TokenView, **settings: Any) -> RandomBatches:
    """L = 7 is prime; chunks are smaller than an expert, so that several make one."""
    config = BalanceConfig(min_batch_tokens=32, timeout_seconds=30.0)
    model = TinyMoE(ExpertShape(num_ranks, 7 * num_ranks, 2), inner=80, hidden=32)
    batches = RandomBatches(model, view, config, num_batches=160 // num_ranks, max_tokens=160)
    return replace(batches, **settings)


def run(run_path: Path, batches: RandomBatches) -> StressReport:
    """Rank 0's report; every rank must have decided alike, and nothing may be wrong."""
    num_ranks = batches.model.shape.num_ranks
    reports = run_ranks(run_stress, num_ranks, run_path, batches, timeout_seconds=120)
    for report in reports:
        assert report.decisions == reports[0].decisions
        assert report.plans == reports[0].plans
        assert report.strays == 0
        assert report.corrupt_slots == 0
        assert report.inexact == 0
    assert sum(report.bytes_sent for report in reports) > 0
    first: StressReport = reports[0]
    return first


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("view", VIEWS)
def test_answers_are_the_same_bits(run_path: Path, view: TokenView, num_ranks: int) -> None:
    batches = make_batches(num_ranks, view)
    if num_ranks == 4:
        batches = replace(batches, relay="always")
    report = run(run_path, batches)
    seen = report.counts()
    assert seen["planned"] >= 10
    assert seen["small"] >= 1
    assert np.mean(report.after) < np.mean(report.before)
    assert max(a - b for a, b in zip(report.after, report.before, strict=True)) < 0


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(4, 2), (3, 1), (8, 4)])
@pytest.mark.parametrize("view", VIEWS)
def test_domains_balance_their_own_experts_against_everybodys_tokens(
    run_path: Path, view: TokenView, num_ranks: int, domain_size: int
) -> None:
    """Domains of one rank move nothing, whatever they see."""
    batches = make_batches(num_ranks, view, domain_size=domain_size)
    batches = replace(batches, relay="always")
    if domain_size == 1:
        reports = run_ranks(run_stress, num_ranks, run_path, batches, timeout_seconds=120)
        assert not any(report.bytes_sent or report.inexact for report in reports)
        assert set(reports[0].counts()) <= {"balanced", "small", "unprofitable"}
        return
    report = run(run_path, batches)
    assert report.counts()["planned"] >= 10
    over_floor = np.array(report.after) / report.floor
    assert over_floor.min() >= 1.0 - 1e-9
    assert np.mean(report.before) / np.mean(report.floor) > 1.1
    assert over_floor.mean() < 1.1


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, None), (4, 2)])
def test_policies_and_impossible_ids_of_one_rank_reach_all_in_the_same_batch(
    run_path: Path, view: TokenView, num_ranks: int, domain_size: int | None
) -> None:
    """Batches with impossible ids are left alone on every rank."""
    batches = make_batches(num_ranks, view, policies=tuple(Policy), num_batches=200)
    report = run(run_path, replace(batches, bad_id_rate=0.2, domain_size=domain_size))
    seen = report.counts()
    assert min(seen[name] for name in ("planned", "forced", "policy_off", "inconsistent")) >= 5
    by_batch: dict[int, set[Decision]] = {}
    for batch, _, decision in report.decisions:
        by_batch.setdefault(batch, set()).add(decision)
    for decisions in by_batch.values():
        assert not {Decision.PLANNED, Decision.FORCED} <= decisions
        assert Decision.POLICY_OFF not in decisions or len(decisions) == 1


@pytest.mark.parametrize(("num_ranks", "domain_size"), [(2, None), (4, 2)])
@pytest.mark.parametrize("view", VIEWS)
def test_copies_stay_where_layers_have_slots_of_their_own_until_a_rank_has_all_forget_them(
    run_path: Path, view: TokenView, num_ranks: int, domain_size: int | None
) -> None:
    batches = make_batches(num_ranks, view, domain_size=domain_size, relay="always")
    policies = (*[Policy.QUOTA] * 3, Policy.OFF)
    config = batches.config.replace(slot_memory="per_layer")
    batches = replace(batches, config=config, policies=policies, bad_id_rate=0.01)
    report = run(run_path, batches)
    assert report.counts()["planned"] >= 10
    assert report.kept >= 10


@pytest.mark.parametrize("view", VIEWS)
def test_a_slower_rank_gets_less_and_answers_stay_the_same(run_path: Path, view: TokenView) -> None:
    batches = make_batches(2, view, pause_rate=0.0)
    config = batches.config.replace(speeds="1.0,0.5")
    report = run(run_path, replace(batches, config=config))
    assert report.counts()["planned"] >= 10
    assert np.median(report.after) == pytest.approx(1.0, abs=0.02)  # of time
