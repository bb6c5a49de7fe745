"""`ultraep-serve replay` and `make-trace`, from the command line to the files they leave."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ultraep_lab.comparators import POLICIES, PolicyFunction
from ultraep_lab.errors import TraceError
from ultraep_lab.replay import replay
from ultraep_lab.replay_options import ReplayOptions
from ultraep_lab.store import load_trace, save_trace
from ultraep_lab.trace import LoadTrace, Trace
from ultraep_lab.workloads import Workload, make_trace
from ultraep_serve.cli import execute
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.errors import ConfigError, UltraEPError

POLICY_KEYS = {
    "imbalance_before",
    "imbalance_after",
    "busiest_expert",
    "replicas",
    "remote_fraction",
    "plan_seconds",
}


def command(*words: object) -> int:
    """Run one command line; errors are raised."""
    return execute([str(word) for word in words])


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 batches of 512 tokens, 3 layers, 32 experts; the hot spot moves after each batch."""
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    save_trace(
        path,
        make_trace(
            Workload(
                kind="rotate",
                num_tokens=3100,
                num_layers=3,
                num_experts=32,
                top_k=4,
                num_ranks=4,
                period=512,
            )
        ),
    )
    return path


def test_json_has_what_was_promised(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    words = ("--ep", 4, "--slots", 2, "--batch-tokens", 512, "--json", tmp_path / "r.json")
    policies = [word for name in POLICIES if name != "lplb" for word in ("--policy", name)]
    assert command("replay", trace_file, *words, *policies) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert (document["ep"], document["slots"]) == (4, 2)
    assert (document["batch_tokens"], document["batches"]) == (512, 3)  # 3 more are history
    assert set(document) == {
        "ep", "slots", "batch_tokens", "batches", "policies", "trace", "layers",
    }  # fmt: skip
    assert set(document["policies"]) == set(POLICIES) - {"lplb"}
    for row in document["policies"].values():
        assert set(row) >= POLICY_KEYS
        for name in ("imbalance_before", "imbalance_after"):
            assert set(row[name]) == {"mean", "p50", "p99", "max"}
            assert 1 <= row[name]["p50"] <= row[name]["p99"] <= row[name]["max"]
        assert set(row["replicas"]) == {"mean", "max"}
        assert set(row["plan_seconds"]) == {"p50", "p99"}
        assert 0 <= row["remote_fraction"] <= 1
    off, quota = document["policies"]["off"], document["policies"]["quota"]
    assert off["imbalance_after"] == off["imbalance_before"] == quota["imbalance_before"]
    assert off["imbalance_after"]["mean"] == pytest.approx(2, rel=0.1)
    assert quota["imbalance_after"]["max"] < 1.02
    assert quota["remote_fraction"] < off["remote_fraction"]
    # The hot spot has always moved on by the time that eplb has learned of it.
    assert document["policies"]["eplb"]["imbalance_after"]["mean"] > 1.3
    table = capsys.readouterr().out
    assert all(name[:6] in table for name in document["policies"])


def test_remote_is_what_leaves_its_rank() -> None:
    """Rank 0's two tokens choose expert 0 at home; rank 1's two choose expert 0 too, remotely."""
    trace = Trace(np.zeros((4, 1, 1), np.uint8), np.array([4]), 2)
    result = replay(
        trace, ReplayOptions(num_ranks=2, num_slots=0, batch_tokens=4), [POLICIES["off"]]
    )
    assert result.policies["off"].remote == [2]
    assert result.imbalance_before == [2.0]


def test_staying_copies_in_the_first_batches_of_steady_traffic(tmp_path: Path) -> None:
    """Layer by layer, with costs or without."""
    sizes = {"num_layers": 2, "num_experts": 32, "top_k": 4, "num_ranks": 4}
    trace = make_trace(Workload(kind="zipf", num_tokens=8192, **sizes))
    options = ReplayOptions(num_ranks=4, num_slots=2, batch_tokens=1024)
    policies = [POLICIES["quota"], POLICIES["staying"]]
    dear = IntegerCosts(1, 0, 10**9, 0, 0, 0)
    result = replay(trace, options, policies)
    moved = {
        name: [transfer.busiest_link for transfer in found.transfers]
        for name, found in result.policies.items()
    }
    assert min(moved["quota"]) >= 1
    assert min(moved["staying"][:2]) >= 1
    assert sum(moved["staying"][2:]) < sum(moved["quota"][2:]) / 2
    assert max(result.policies["staying"].imbalance_after) < 1.05
    unpaid = replay(trace, options, policies[1:], dear).policies["staying"]
    assert not any(transfer.busiest_link for transfer in unpaid.transfers)


def test_domains_have_a_floor(trace_file: Path, tmp_path: Path) -> None:
    words = ("--ep", 4, "--batch-tokens", 512, "--domain-size", 2, "--json", tmp_path / "r.json")
    command("replay", trace_file, *words, "--policy", "quota")
    document = json.loads((tmp_path / "r.json").read_text())
    floor = document["floor"]
    assert set(floor) == {"mean", "p50", "p99", "max"}
    assert floor["mean"] > 1.1
    for row in document["policies"].values():
        assert floor["mean"] - 1e-9 <= row["imbalance_after"]["mean"] <= floor["mean"] * 1.01


class Spy:
    """A policy that remembers which past it was shown."""

    def __init__(self) -> None:
        self.past: list[np.ndarray] = []
        self.now: list[np.ndarray] = []

    def place(self, loads: Any, context: Any, history: Any) -> Any:
        if len(history):
            assert history.shape[1:] == loads.shape
        self.past.append(history)
        self.now.append(loads)
        return POLICIES["off"].place(loads, context, history)


@pytest.mark.parametrize(
    ("settings", "seen"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"skip": 0}, [0, 1, 2, 3, 4, 5]),
        ({"history_batches": 2}, [0, 1, 2, 2, 2, 2]),
        ({"rebalance_every": 3}, [0, 0, 0, 3, 3, 3]),
        ({"skip": 2}, [2, 3, 4, 5]),
        ({"skip": 2, "limit": 1}, [2]),
        ({"skip": 2, "rebalance_every": 4}, [2, 2, 4, 4]),
    ],
)
def test_policies_see_only_the_past(
    trace_file: Path, settings: dict[str, int], seen: list[int]
) -> None:
    spy = Spy()
    options = ReplayOptions(num_ranks=4, batch_tokens=512, layers=(1,), **settings)  # type: ignore[arg-type]
    replay(load_trace(trace_file), options, [PolicyFunction("spy", "", spy.place)])
    assert [len(past) for past in spy.past[1:]] == seen  # the first call only warms up
    if not settings:
        assert np.array_equal(spy.past[-1], np.stack(spy.now[1:-1]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ep", 5), "cannot be divided by 5"),
        (("--ep", 0), "--ep = 0 must be 1 or more"),
        (("--ep", 4, "--slots", -1), "--slots"),
        (("--ep", 4, "--batch-tokens", 0), "--batch-tokens"),
        (("--ep", 4, "--batch-tokens", 4000), "less than one batch"),
        (("--ep", 4, "--policy", "best"), "unknown policy"),
        (("--ep", 4, "--layers", "3"), "must be from 0 to 2"),
        (("--ep", 4, "--layers", "x"), "as in 0 3 6-8"),
        (("--ep", 4, "--layers", "0-99999999999"), "as in 0 3 6-8"),
        (("--ep", 4, "--limit", 0), "--limit"),
        (("--ep", 4, "--skip", 6), "no batch is left"),
        (("--ep", 4, "--domain-size", 0), "--domain-size"),
        (("--ep", 4, "--slots", 1 << 40), "--slots = 1099511627776 must be 0 to 64"),
        (("--ep", 4, "--experts", 16), "topk_ids has"),
        (("--ep", 4, "--experts", 1 << 40), "must be a whole number, 1 to 65536"),
        (("--ep", 4, "--domain-size", 5), "--domain-size = 5 must be 1 to 4"),
        (("--ep", 1 << 12, "--experts", 1 << 12), "smaller --ep"),
    ],
)
def test_bad_words_leave_no_file(
    trace_file: Path, tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    start = ("replay", trace_file, "--batch-tokens", 512, "--policy", "quota")
    with pytest.raises(UltraEPError, match=message):
        command(*start, *words, "--json", tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_several_traces_in_order(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    """6 batches of each and 28 tokens; no batch has tokens of two files."""
    sizes = ("--ep", 4, "--batch-tokens", 512, "--skip", 0, "--policy", "off", "--json", "-")
    command("replay", trace_file, *sizes)
    one = json.loads(capsys.readouterr().out)
    command("replay", trace_file, trace_file, *sizes)
    two = json.loads(capsys.readouterr().out)
    assert (two["batches"], two["trace"]["file"]) == (12, "t.npz, t.npz")
    before = [[row["imbalance_before"] for row in found["layers"]] for found in (one, two)]
    assert before[1] == pytest.approx(before[0])
    loads = LoadTrace(np.ones((2, 3, 4, 32), np.int32))
    save_trace(tmp_path / "l.npz", loads)
    words = ("--ep", 4, "--policy", "off")
    with pytest.raises(TraceError, match="one kind and model"):
        command("replay", trace_file, tmp_path / "l.npz", *words, "--batch-tokens", 512)
    command("replay", tmp_path / "l.npz", tmp_path / "l.npz", *words, "--json", "-")
    document = json.loads(capsys.readouterr().out)
    assert (document["batches"], document["batch_tokens"]) == (4, None)
    with pytest.raises(TraceError, match="own batches"):
        command("replay", tmp_path / "l.npz", *words, "--batch-tokens", 64)


def test_the_busiest_expert_is_that_of_a_launch() -> None:
    """A copy is an expert of its own to the kernel, so splitting a load makes launches even."""
    loads = LoadTrace(np.array([[[[300, 20], [100, 40]]]], np.int32))
    policies = [POLICIES[name] for name in ("off", "quota")]
    found = replay(loads, ReplayOptions(num_ranks=2, num_slots=1), policies).policies
    assert found["off"].busiest_expert == [400]
    assert found["quota"].busiest_expert == [230]  # of 460 on two ranks


def test_make_trace_then_replay(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.npz"
    sizes = ("--experts", 48, "--top-k", 4, "--layers", 2, "--tokens", 1024, "--ep", 6)
    assert command("make-trace", *sizes, "--imbalance", 1.7, "--seed", 3, "--out", out) == 0
    assert "imbalance 1.7 at EP6" in capsys.readouterr().out
    trace = load_trace(out)
    assert isinstance(trace, Trace)
    assert trace.topk_ids.shape == (1024, 2, 4)
    assert trace.num_experts == 48
    assert trace.metadata["workload"]["seed"] == 3
    assert "basis" in trace.metadata
    assert command("replay", out, "--ep", 6, "--batch-tokens", 512, "--policy", "quota") == 0


def test_a_straggler_is_planned_for(tmp_path: Path, capsys: Any) -> None:
    """The trace says how slow the last rank is; --speeds says otherwise."""
    out, found = tmp_path / "t.npz", tmp_path / "r.json"
    sizes = ("--experts", 32, "--top-k", 4, "--layers", 2, "--tokens", 2048, "--ep", 4)
    command("make-trace", *sizes, "--straggler", 0.5, "--out", out)
    assert "last rank at speed 0.5" in capsys.readouterr().out
    policies = ("--policy", "off,quota,eplb,ideal", "--json", found)
    replayed = ("replay", out, "--batch-tokens", 1024, *policies)

    command(*replayed, "--ep", 4)
    assert "of time" in capsys.readouterr().out
    document = json.loads(found.read_text())
    assert document["speeds"] == [1.0, 1.0, 1.0, 0.5]
    rows = document["policies"]
    assert rows["quota"]["time_imbalance_after"]["max"] < 1.02
    assert rows["quota"]["imbalance_after"]["mean"] > 1.1
    assert rows["ideal"]["time_imbalance_after"]["max"] < 1.01
    assert rows["eplb"]["time_imbalance_before"] == rows["off"]["time_imbalance_after"]

    command(*replayed, "--ep", 4, "--speeds", "equal")
    assert "speeds" not in json.loads(found.read_text())
    command(*replayed, "--ep", 2, "--speeds", "0.6,1", "--domain-size", 1)
    document = json.loads(found.read_text())
    assert document["time_floor"] == document["policies"]["quota"]["time_imbalance_after"]
    with pytest.raises(TraceError, match="made for 4 ranks"):
        command(*replayed, "--ep", 2)
    with pytest.raises(ConfigError, match="2 numbers for 4 ranks"):
        command(*replayed, "--ep", 4, "--speeds", "1,0.5")
