"""Tokens generated twice and compared; the demo's report."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from tests.support.bench_fakes import FakeDeployment, deployed
from ultraep_lab import progress
from ultraep_lab.bench.greedy_tokens import (
    Generation,
    TokenComparison,
    compare_tokens,
    generate,
)
from ultraep_lab.demo.report import demo_report, demo_view
from ultraep_lab.errors import BenchError


@pytest.fixture
def fake() -> Iterator[FakeDeployment]:
    with deployed(FakeDeployment()) as deployment:
        yield deployment


def made(*positions: dict[str, float]) -> Generation:
    """The first of each position's tokens is the chosen one."""
    return Generation([next(iter(each)) for each in positions], positions)


def test_generations_keep_the_order_of_prompts(fake: FakeDeployment) -> None:
    prompts = [f"prompt {number} and more" for number in range(9)]
    generations = generate(fake.url, "fake/model", prompts, max_tokens=3, concurrency=4)
    assert [made.tokens[1] for made in generations] == [str(number) for number in range(9)]
    assert all([len(best) for best in made.likeliest] == [2, 2, 2] for made in generations)
    assert compare_tokens(generations, generations).identical == 9


def test_a_second_run_finds_nothing_in_the_prefix_cache(fake: FakeDeployment) -> None:
    for _ in range(2):
        generate(fake.url, "fake/model", ["one prompt"], 2, 1)
    assert len(set(fake.salts) - {None}) == 2


def test_comparison_stops_at_the_first_difference() -> None:
    sure, nearly = {"a": -1.0}, {"a": -1.25}
    first = [made(sure, {"b": -0.5, "c": -2.0}, {"d": -1.0}), made(sure, sure), made(sure, sure)]
    second = [made(nearly, {"c": -0.5, "b": -1.0}, {"e": -9.0}), made(sure, {"a": -1.5})]
    comparison = compare_tokens(first, [*second, made(sure)])  # which ends earlier
    assert (comparison.prompts, comparison.identical, comparison.ties) == (3, 1, 0)
    assert comparison.first_difference == 1
    assert comparison.max_logprob_difference == 1.5  # of "c"
    with pytest.raises(BenchError, match="0 and 1 prompts"):
        compare_tokens([], second[:1])


@pytest.mark.parametrize(
    ("apart", "more", "ties"),
    [(4e-6, 4e-6, 1), (4e-6, 2e-4, 0), (2e-4, 4e-6, 0), (4e-6, None, 0)],
)
def test_tokens_that_both_runs_find_equally_likely_are_a_tie(
    apart: float, more: float | None, ties: int
) -> None:
    """A difference counts where either run tells the two apart, or does not list the other one."""
    other = {} if more is None else {"a": -1.0 - more}
    first = made({"x": -1.0}, {"a": -1.0, "b": -1.0 - apart}, {"y": -1.0})
    second = made({"x": -1.0}, {"b": -1.0, **other}, {"z": -3.0})
    comparison = compare_tokens([first], [second])
    assert (comparison.same, comparison.ties) == (ties, ties)
    assert comparison.first_difference == (None if ties else 1)
    assert comparison.max_logprob_difference < 1e-3


def bench_document(**ttft: float) -> dict[str, Any]:
    row = {"prompt_tokens": 4096, "ttft_seconds": ttft, "efficiency": 0.9, "recovered": 0.8}
    imbalance = {"before": {"mean": 1.5, "max": 2.0}, "after": {"mean": 1.01, "max": 1.03}}
    common = {"ranks": 2, "imbalance": imbalance, "layers": [], "machine": {}, "command": ""}
    return {**common, "rows": [row | {"rounds": 7}]}


def shown(report: dict[str, Any]) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(demo_view(report))
    return console.export_text()


@pytest.mark.parametrize(("identical", "apart"), [(63, 0.0), (64, 2e-4)])
def test_demo_view_shows_wrong_answers(identical: int, apart: float) -> None:
    """Of tokens, or of log-probabilities that differ by more than rounding."""
    check = TokenComparison(64, identical, 0, None, apart).to_json("float32")
    text = shown(demo_report(bench_document(off=2.0, quota=1.25, ideal=1.125), check))
    assert f"✘ {identical} of 64 prompts" in text


def test_progress_tells_a_log_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    told = progress.Progress()
    for now[0], left in ((1.0, None), (4.0, 90.0), (12.0, 61.0), (13.0, 60.0)):
        told.say("measuring", left)
    told.say("comparing", 20.0, always=True)
    assert capsys.readouterr().err.splitlines() == [
        "[0:01] measuring",
        "[0:12] measuring, about 1:01 left",
        "[0:13] comparing, about 0:20 left",
    ]
