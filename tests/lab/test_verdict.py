"""Whether balancing pays: the end of a replay, by costs that make it easy to work out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_lab.comparators import POLICIES
from ultraep_lab.replay import replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import save_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_lab.verdict import Verdict, chosen, judge, words
from ultraep_serve.cli import execute
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError

# Two ranks of two experts, both of whose tokens choose the first rank's: 600 and 0 assignments.
LOADS = np.array([[[[200, 100, 0, 0], [200, 100, 0, 0]]]])


def verdict_of(loads: np.ndarray, costs: CostModel, policy: str = "quota") -> Verdict:
    options = ReplayOptions(num_ranks=2, num_slots=2)
    result = replay(LoadTrace(loads), options, [POLICIES[policy]], costs.integer_costs())
    return judge(result, policy, costs)


def costs(seconds_per_copy: float) -> CostModel:
    return CostModel(1e-6, 1000, 1000 / seconds_per_copy, exchange_seconds=1e-5, plan_seconds=1e-5)


def test_a_plan_that_pays_is_followed() -> None:
    found = verdict_of(LOADS, costs(5e-5))
    assert found.imbalance_before == 2.0
    assert found.imbalance_after < 1.005  # 301 of 600, as far as a server plans
    assert found.balanced_share == 1.0
    assert found.off_seconds == pytest.approx(600e-6)
    assert found.on_seconds == pytest.approx(301e-6 + 1e-5 + 1e-5 + 5e-5)  # one expert is copied
    # 299 us are saved where there are 600 assignments; 70 us are spent, whatever there is.
    assert found.min_assignments == 140
    turn_it_on = "Turn it on: --slots 2 --slot-memory shared --min-batch-tokens 35"
    assert words([found], 4)[0] == turn_it_on
    assert "1.62 times as fast" in words([found], 4)[1]


def test_a_plan_that_does_not_pay_is_not() -> None:
    found = verdict_of(LOADS, costs(1e-3))
    assert (found.balanced_share, found.imbalance_after) == (0.0, 2.0)
    assert found.on_seconds == pytest.approx(610e-6)  # loads are exchanged even so
    assert "moving experts takes as long as it saves; from about 511" in words([found], 4)[0]


def test_copies_that_stay_are_paid_for_once() -> None:
    alike = np.repeat(LOADS, 8, axis=0)
    shared, staying = (verdict_of(alike, costs(2.5e-4), name) for name in ("quota", "staying"))
    assert (shared.copies, staying.copies) == (1.0, 1 / 8)
    assert shared.on_seconds - staying.on_seconds == pytest.approx(7 / 8 * 2.5e-4, rel=0.01)
    assert chosen([shared, staying]) is staying
    assert words([shared, staying], 4)[0].startswith(
        "Turn it on: --slots 2 --slot-memory per_layer --min-batch-tokens"
    )
    assert chosen([verdict_of(LOADS, costs(5e-5), name) for name in ("staying", "quota")]) == (
        verdict_of(LOADS, costs(5e-5))
    )  # a trace of one batch gains nothing from memory of its own


def test_replay_ends_with_it(tmp_path: Path, capsys: Any) -> None:
    ids = np.random.default_rng(0).integers(0, 24, (16384, 2, 8))  # of 128: some ranks are hot
    save_trace(tmp_path / "t.npz", Trace(ids, np.array([16384]), 128))
    replayed = ["replay", str(tmp_path / "t.npz"), "--ep", "16", "--batch-tokens", "16384"]
    replayed += ["--policy", "off"]
    machine = ["--hardware", "h200", "--model-config", "qwen3-235b-a22b"]
    execute([*replayed, *machine])
    shown = capsys.readouterr().out
    assert "lowest possible in domains of 8 ranks" in shown  # as many as NVLink joins
    assert "Turn it on: --slots" in shown
    (tmp_path / "log").write_text(f"x\nultraep: costs {costs(5e-5).to_json()}\n")
    execute([*replayed, "--costs", str(tmp_path / "log"), "--json", "-"])
    document = json.loads(capsys.readouterr().out)
    choices = [(found["slots"], found["slot_memory"]) for found in document["verdict"]["choices"]]
    assert choices == [(1, "shared"), (1, "per_layer"), (2, "shared"), (2, "per_layer")]
    for wrong in (machine[:2], [*machine, "--costs", "x"]):
        with pytest.raises(ConfigError, match=r"--hardware"):
            execute([*replayed, *wrong])
