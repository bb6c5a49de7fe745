"""`ultraep-serve simulate`: nothing is lost, nothing depends on who computes it, and by seed."""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ultraep_kernels.host.relays import relay_parents

from ultraep_lab.advise.advice import Setting
from ultraep_lab.comparators.placement import home_first_shares
from ultraep_lab.simulate import layer as simulated_layer
from ultraep_lab.simulate import simulation
from ultraep_lab.simulate.layer import FIGURES, GroupMachine, Variant, follow, judge
from ultraep_lab.simulate.simulation import Fleet, draw_machine
from ultraep_lab.simulate.traffic import Captured, SimulatedTraffic, Synthetic, pieces_of
from ultraep_lab.store import save_trace
from ultraep_lab.trace import LoadTrace, Trace, over_source_ranks
from ultraep_lab.workloads import KINDS, Kind, Workload, make_trace
from ultraep_serve.balance.host import balancer
from ultraep_serve.cli import main
from ultraep_serve.costs.hardware import estimate_costs, hardware
from ultraep_serve.costs.shapes import PRESETS, shape_from_config
from ultraep_serve.errors import TraceError
from ultraep_serve.plan import quota
from ultraep_serve.plan.checks import check_plan
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import imbalance

EXPERTS, TOP_K = 24, 2
MODEL = {**PRESETS["qwen3-30b-a3b"], "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
SHAPE = shape_from_config(MODEL, "small")
LARGE_MODEL = ("--model-config", "qwen3-30b-a3b")
ONE_IMBALANCE = ("--imbalance", "1.5")  # each of the usual ones takes a while to be met
SMALL = ("--ranks", "8", "--batches", "3", "--rank-tokens", "256", "--processes", "1")


def workload_of(kind: Kind, num_ranks: int, **changes: Any) -> Workload:
    sizes = {"num_tokens": 1, "num_layers": 1, "num_experts": EXPERTS, "top_k": TOP_K}
    return Workload(kind=kind, num_ranks=num_ranks, **{**sizes, **changes})


def variant(num_ranks: int, slots: int, domain: int | None, relay: str = "auto") -> Variant:
    costs = estimate_costs(SHAPE, hardware("gb200"), num_ranks=num_ranks, domain_size=domain)
    return Variant(Setting(SHAPE, costs, num_ranks, "bf16", domain), slots, relay)


@cache
def made_up(num_ranks: int, kind: Kind = "switch", assignments: int = 1 << 16) -> Synthetic:
    workload = workload_of(kind, num_ranks, imbalance=1.0, period=2)
    imbalances = (1.2, 1.5) if num_ranks > 1 else (1.0,)
    return Synthetic.made(workload, imbalances, 5, assignments)


@cache
def recorded() -> Captured:
    """A trace of 20 sequences, and one of loads."""
    tokens = make_trace(workload_of("zipf", 4, num_tokens=5000, num_layers=5, imbalance=1.5))
    loads = np.random.default_rng(0).integers(0, 99, (7, 5, 4, EXPERTS), np.int32)
    return Captured.drawn([pieces_of(tokens), pieces_of(LoadTrace(loads))], 1 << 16, 2)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Variant, GroupMachine, np.ndarray]:
    """A variant, ranks and links of any speed, links that are dead, and loads of its size."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 8, 12]))
    domain = draw(st.one_of(st.none(), st.integers(1, num_ranks)))
    relay = draw(st.sampled_from(["auto", "always", "never"]))
    chosen = variant(num_ranks, draw(st.integers(0, 4)), domain, relay)
    chance = st.sampled_from([0.0, 0.2, 0.7, 1.0])
    fleet = Fleet(
        ranks=num_ranks,
        batches=1,
        plans=1,
        slow_ranks=draw(chance),
        slowest=0.01,
        slow_links=draw(chance),
        slowest_link=0.3,
        dead_links=draw(chance),
    )
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    traffic: SimulatedTraffic = draw(st.sampled_from([recorded, lambda: made_up(num_ranks)]))()
    layer = np.array([draw(st.integers(0, 4))])
    (loads,) = over_source_ranks(
        traffic.of_group(rng).expert_loads(draw(st.integers(0, 9)), layer), num_ranks
    )
    return chosen, draw_machine(fleet, num_ranks, rng), loads


@settings(deadline=None, max_examples=150)
@given(cases())
def test_every_assignment_is_computed_once_in_every_variant(
    case: tuple[Variant, GroupMachine, np.ndarray],
) -> None:
    chosen, machine, loads = case
    context = replace(chosen.context, speeds=machine.speeds)
    shape = context.shape
    plan = plan_quota(loads, context, 0)
    parents = relay_parents(plan.slot_expert, shape.num_masters, chosen.relay)
    followed = follow(plan, parents, machine.alive, shape.num_masters)
    assert np.array_equal(followed.quota.sum(1), loads.sum(0))
    arrived = followed.slot_expert >= 0
    ranks, slots = np.nonzero(arrived)
    sender = parents[ranks, slots] // max(1, shape.num_replica_slots)
    relays = parents[ranks, slots] >= 0
    masters = followed.slot_expert[ranks, slots] // shape.num_masters
    assert machine.alive[np.where(relays, sender, masters), ranks].all()
    assert arrived.ravel()[parents[ranks, slots][relays]].all()  # a relay has what it forwards
    shares = home_first_shares(loads, followed.quota)
    check_plan(loads, context, followed.slot_expert, followed.quota, shares)
    figures = dict(zip(FIGURES, judge(chosen, machine, loads), strict=True))
    assert figures["after"] == imbalance(followed.quota.sum(0))
    assert figures["time_after"] == imbalance(followed.quota.sum(0), machine.speeds)
    assert 0 <= figures["lost_copies"] <= figures["copies"]
    assert 0 <= figures["returned"] <= 1
    assert figures["floor"] <= figures["planned"] * (1 + 1e-9)
    assert min(figures["off_seconds"], figures["seconds"]) > 0
    if not figures["lost_copies"]:
        assert figures["planned"] == figures["after"]


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_loads_are_conserved_and_as_imbalanced_as_asked(kind: str) -> None:
    traffic = made_up(4, kind)
    layers = np.arange(5)
    for group in range(3):
        own = traffic.of_group(np.random.default_rng(group))
        for batch in range(4):
            loads = own.expert_loads(batch, layers)
            assert (loads.sum(1) == 1 << 16).all()
            assert (over_source_ranks(loads, 4).sum(1) == loads).all()
            found = [imbalance(layer.reshape(4, -1).sum(1)) for layer in loads]
            assert 1 <= min(found) <= max(found) <= 1.55
            assert kind == "burst" or min(found) >= 1.15


def test_recorded_loads_are_whole_sequences() -> None:
    ids = np.zeros((6, 1, 1), np.int64)
    ids[:, 0, 0] = (0, 0, 1, 2, 2, 2)
    pieces = pieces_of(Trace(ids, np.array([2, 1, 0, 3]), 3))
    assert pieces.tolist() == [[[2, 0, 0]], [[0, 1, 0]], [[0, 0, 3]]]
    own = Captured.drawn([pieces], 8, 1).of_group(np.random.default_rng(0))  # 4 of 2 tokens each
    for batch in range(20):
        (loads,) = own.expert_loads(batch, np.array([0]))
        assert loads[0] // 2 + loads[1] + loads[2] // 3 == 4
        assert loads[0] % 2 == loads[2] % 3 == 0


def test_many_sequences_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace(workload_of("zipf", 4, num_tokens=5000, num_layers=2, imbalance=1.5))
    whole = pieces_of(trace)
    monkeypatch.setattr("ultraep_lab.simulate.traffic.MAX_PIECE_BYTES", whole.nbytes // 3)
    merged = pieces_of(trace)
    assert len(whole) == 20 > len(merged) >= 3
    assert np.array_equal(merged.sum(0), whole.sum(0))


def test_a_relay_that_gets_nothing_forwards_nothing() -> None:
    """Rank 0's only expert goes to all others, behind two relays; the link to one is dead."""
    chosen = variant(12, 1, None, "always")
    loads = np.zeros((12, EXPERTS), np.int64)
    loads[0, 0] = 1200
    plan = plan_quota(loads, chosen.context, 0)
    parents = relay_parents(plan.slot_expert, 2, "always")
    relay = int(np.flatnonzero((parents == -1) & (plan.slot_expert == 0))[0])
    behind = np.flatnonzero(parents == relay)
    assert behind.size
    alive = np.ones((12, 12), bool)
    alive[0, relay] = alive[relay, 0] = False
    followed = follow(plan, parents, alive, 2)
    lost = [relay, *behind]
    assert (followed.slot_expert[lost] == -1).all()
    assert not followed.quota[:, lost].any()
    assert followed.quota[0, 0] == plan.quota[0, 0] + plan.quota[0, lost].sum()


def test_a_slow_link_takes_longer_and_changes_no_plan() -> None:
    chosen = variant(4, 2, None)
    loads = over_source_ranks(np.array([[40000] * 6 + [0] * 18]), 4)[0]
    speeds, alive = np.full(4, 1024), np.ones((4, 4), bool)
    usual, slow = (
        dict(
            zip(FIGURES, judge(chosen, GroupMachine(speeds, 1.0, links, alive), loads), strict=True)
        )
        for links in (np.ones(4), np.array([0.5, 1, 1, 1]))
    )
    assert usual["is_followed"]
    moved = usual["link_bytes"] / chosen.setting.estimate.costs.link_bytes_per_second
    assert slow["seconds"] - usual["seconds"] == pytest.approx(moved)
    assert slow["after"] == usual["after"]


def report(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The JSON that a command leaves."""
    path = tmp_path / "report.json"
    assert main(["simulate", *words, "--json", str(path)]) == 0
    return dict(json.loads(path.read_text()))


def test_the_planner_is_the_one_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulated_layer.plan_quota is balancer.plan_quota is quota.plan_quota
    planned = []

    def counted(*given: Any, **more: Any) -> Any:
        planned.append(given)
        return quota.plan_quota(*given, **more)

    monkeypatch.setattr(simulated_layer, "plan_quota", counted)
    words = ("--ep", "4,8", "--slots", "1,2", "--layers", "2", *LARGE_MODEL)
    found = report(tmp_path, *SMALL, *words)
    assert [row["name"] for row in found["variants"]] == [
        f"EP{ep}, domains of {ep}, {slots}, relays auto"
        for ep in (4, 8)
        for slots in ("1 slot", "2 slots")
    ]
    assert [row["planned_layers"] for row in found["variants"]] == [12, 12, 6, 6]
    assert len(planned) == 36


def test_the_report_is_that_of_the_seed_with_any_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.npz"
    save_trace(
        trace,
        make_trace(workload_of("zipf", 4, num_tokens=3000, num_layers=4, num_experts=128, top_k=8)),
    )
    faults = ("--slow-ranks", "0.3", "--slow-links", "0.2", "--dead-links", "0.1")
    words = (*SMALL, "--ep", "4", "--trace", str(trace), *LARGE_MODEL, *faults, "--plans", "17")
    texts = []
    for seed, processes in (("5", "1"), ("5", "2"), ("6", "1")):
        found = report(tmp_path, *words, "--seed", seed, "--processes", processes)
        timed = found.pop("plan_seconds")
        assert all(0 < row["p1"] <= row["worst"] for row in timed["variants"])
        found.pop("fleet")
        texts.append(json.dumps(found))
        assert "planned 17 of 24 layers" in capsys.readouterr().out
        (row,) = found["variants"]
        for kind in ("imbalance", "time_imbalance"):
            assert row[kind]["planned"]["p99"] <= row[kind]["after"]["p99"]
        assert 0 < row["lost_copies"] < 1
    assert texts[0] == texts[1] != texts[2]


def test_dead_links_change_no_traffic_and_no_speed(tmp_path: Path) -> None:
    words = (*SMALL, *ONE_IMBALANCE, "--ep", "4", "--layers", "2", *LARGE_MODEL)
    words = (*words, "--slow-ranks", "0.5")
    sound = report(tmp_path, *words)["variants"][0]
    cut = report(tmp_path, *words, "--dead-links", "1")["variants"][0]
    assert cut["time_imbalance"]["planned"] == sound["time_imbalance"]["after"]
    assert cut["time_imbalance"]["before"] == sound["time_imbalance"]["before"]
    assert cut["time_imbalance"]["after"] == cut["time_imbalance"]["before"]  # all go home
    assert (cut["lost_copies"], cut["busiest_link_bytes"]["worst"]) == (1.0, 0.0)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    words = (*SMALL, *ONE_IMBALANCE, "--ep", "4,8", "--layers", "2", *LARGE_MODEL)
    drawn = []
    for name in ("one", "two"):
        assert main(["simulate", *words, "--plots", str(tmp_path / name)]) == 0
        drawn.append((tmp_path / name / "simulation.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert b"<svg" in drawn[0]


def test_imbalances_that_few_ranks_cannot_have_are_left_out() -> None:
    workload = workload_of("zipf", 2, imbalance=1.0)
    assert Synthetic.made(workload, None, 1, 10).imbalances == (1.3, 1.6)
    with pytest.raises(TraceError, match="cannot be reached"):
        Synthetic.made(workload, (1.3, 3.0), 1, 10)


BAD = [
    (("--ranks", "4", *ONE_IMBALANCE), "--ranks = 4 is less than one group of --ep 64"),
    (("--ep", "48"), "256 experts of deepseek-v3 cannot be divided by 48 ranks"),
    (("--slow-ranks", "2"), "--slow-ranks = 2 must be 0 to 1"),
    (("--dead-links", "nan"), "--dead-links = nan must be a number, 0 to 1"),
    (("--slowest", "0"), "--slowest = 0 must be 0.01 to 1"),
    (("--relay", "sometimes"), "--relay = sometimes must be 'auto', 'always' or 'never'"),
    (("--imbalance", "fast"), "--imbalance = fast must be a number, 1 or more"),
    (("--imbalance", "90"), "--imbalance = 90.0 cannot be reached"),
    (("--imbalance", "inf"), "--imbalance = inf must be a number"),
    (("--rank-tokens", "9" * 30), "choose a smaller --rank-tokens or --ep"),
    (("--batches", "0"), "--batches = 0 must be 1 to 100000"),
    (("--processes", "0"), "--processes = 0 must be 1 to 256"),
    (("--hardware", "custom"), "--hardware custom and --costs FILE go together"),
    (("--trace", "none.npz"), "none.npz"),
    (("--trace", "none.npz", "--kind", "zipf"), "--kind is for made-up traffic"),
    (("--json", "/proc/x", *ONE_IMBALANCE), "/proc/x"),
]


@pytest.mark.parametrize(("words", "expected"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_line(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ultraep-serve: error: ")
    assert expected in line


def test_a_lost_worker_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that the system ends, for lack of memory say."""
    monkeypatch.setattr(simulation, "_begin_worker", ends_itself)
    words = ("--ep", "4", "--layers", "1", "--processes", "2", *LARGE_MODEL, *ONE_IMBALANCE)
    assert main(["simulate", *SMALL, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "choose fewer --processes" in line


def ends_itself(*_: object) -> None:
    os._exit(9)
