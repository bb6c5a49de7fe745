"""Ranks that die or stop, groups that start and end."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.endurance import (
    Death,
    cycle_group,
    kill_one,
    mortal_batches,
    run_until_death,
)
from tests.support.ranks import run_ranks
from ultraep_serve.types import Stage, TokenView


@pytest.mark.parametrize("how", ["by a fault", "a moment later"])
@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.name.lower())
def test_a_rank_that_dies_after_a_stage_ends_the_others_and_nothing_else(
    stage: Stage, how: str
) -> None:
    """The survivors' outputs were all right until then, while policies were switched."""
    later = 2e-4 if how == "a moment later" else 0.0
    death = Death(stage.value % 3, stage, 3 + stage.value, later, signal.SIGSEGV)
    assert kill_one(mortal_batches(3, TokenView.OWN, stage.value), death) == []


@pytest.mark.parametrize("stage", [Stage.COUNT, Stage.PLAN, Stage.REROUTE, Stage.WAIT])
def test_a_rank_that_stops_for_too_long_is_given_up_and_ends_when_it_goes_on(
    run_path: Path, stage: Stage
) -> None:
    batches = mortal_batches(3, TokenView.OWN, 1)
    batches = replace(batches, config=batches.config.replace(timeout_seconds=2.0))
    death = Death(1, stage, 5, number=signal.SIGSTOP, stopped_seconds=5.0)
    reports = run_ranks(run_until_death, 3, run_path, batches, death)
    assert "rank 1 did not answer within 2 s" in reports[0].lost + reports[2].lost
    for report in reports:
        assert report.lost
        assert (report.inexact, report.corrupt_slots) == (0, 0)


def test_a_rank_that_stops_for_less_is_waited_for(run_path: Path) -> None:
    batches = replace(mortal_batches(3, TokenView.OWN, 2), num_batches=8)
    death = Death(1, Stage.PLAN, 5, number=signal.SIGSTOP, stopped_seconds=1.0)
    for report in run_ranks(run_until_death, 3, run_path, batches, death):
        assert (report.lost, report.inexact, report.corrupt_slots) == ("", 0, 0)
        assert report.counts()["planned"] > 0


def test_groups_that_start_and_end_leave_and_keep_nothing(run_path: Path) -> None:
    for seen in run_ranks(cycle_group, 2, 2, run_path, 40):
        held = np.array([(row.mappings, row.descriptors) for row in seen.values()])
        assert (held[-1] <= held[0] + [4, 0]).all(), seen  # an allocator may map once more
    assert list(run_path.iterdir()) == []
