"""What ``benchmarks/agents.py`` and ``benchmarks/serving.py`` do without engines."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ultraep_lab.bench.aiperf import Answer
from ultraep_lab.bench.prompts import Openings
from ultraep_lab.demo.text import domain_words

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = (
    *("agents", "load", "served", "sglang_eplb", "harness"),
    *("serving_answers", "serving_mixed", "permute"),
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import agents  # type: ignore[import-not-found]  # a script, on no path of mypy's

    yield agents
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def test_conversations_share_a_beginning_in_one_window_alone(script: ModuleType) -> None:
    traffic, openings = script.Traffic(6, 2, 100), Openings()
    one, another = traffic.drawn(0, openings), traffic.drawn(0, openings)
    assert len({conversation.system for conversation in one}) == 1
    assert one[0].system.split()[0] != another[0].system.split()[0]
    assert [conversation.turns for conversation in one] == [talk.turns for talk in another]
    other = traffic.drawn(1, openings)
    texts = [turn.text for talk in (*one, *other) for turn in talk.turns]
    assert len(set(texts)) == len(texts)
    for conversation in one:
        assert 6 <= len(conversation.turns) <= 12
        assert conversation.turns[0].seconds == 0
        assert all(0.1 <= turn.seconds <= 1.0 for turn in conversation.turns[1:])
        assert all(128 <= len(turn.text.split()) <= 768 for turn in conversation.turns)


def test_the_subject_changes_between_conversations(script: ModuleType) -> None:
    law, code = script.Traffic(2, 1, 10).drawn(0, Openings())
    words = set(domain_words("law"))
    assert all(words & set(turn.text.split()) for turn in law.turns)
    assert not any(words & set(turn.text.split()) for turn in code.turns)


def test_both_limits_must_be_met(script: ModuleType) -> None:
    answers = [Answer(1.5, 0.015), Answer(1.6, 0.01), Answer(0.1, 0.016), Answer(9.0, 0.01)]
    assert script.share(answers, 1.0) == 0.25
    assert script.share(answers, 2.0) == 0.75


def test_means_and_ratios_over_repeats(script: ModuleType) -> None:
    def window(contender: str, repeat: int, value: float) -> dict[str, Any]:
        figures = {f"{name}_seconds": value for name in script.FIGURES}
        good = {
            "goodput_per_second": value - 1,
            "good_share": {f"{n:g}": n / 8 for n in script.SCALES},
        }
        return {"contender": contender, "repeat": repeat, **figures, **good}

    windows = [window("off", i, 2.0 * i) for i in (1, 2, 3)]
    windows += [window("quota", i, 1.0 * i * i) for i in (1, 2)]
    off, quota = script.summary(windows)
    assert (off["repeats"], off["ttft_p99_seconds"], off["good_share"]["2"]) == (3, 4.0, 0.25)
    assert "over_quota" not in quota
    ratio = off["over_quota"]["itl_p50_seconds"]
    assert (ratio["median"], ratio["min"], ratio["max"]) == (1.5, 1.0, 2.0)
    assert "goodput_per_second" not in off["over_quota"]  # quota's was 0 once


def test_prompts_arrive_while_all_streams_decode(script: ModuleType) -> None:
    import serving_mixed as mixed  # type: ignore[import-not-found]  # as ``agents``

    requests = mixed.schedule(Openings(), 1)
    assert [request.seconds for request in requests] == sorted(r.seconds for r in requests)
    streams = [request for request in requests if request.seconds == 0]
    assert {request.output_tokens for request in streams} == {mixed.STREAM_TOKENS}
    prompts = requests[len(streams) :]
    assert {request.output_tokens for request in prompts} == {1}  # has no time between tokens
    assert all(len(request.prompt.split()) >= mixed.PROMPT_TOKENS for request in prompts)
    again = mixed.schedule(Openings(), 1)
    texts = [[r.prompt.split()[4:] for r in each] for each in (requests, again)]
    assert texts[0] == texts[1]


def test_perplexity_and_its_ratio(script: ModuleType) -> None:
    pytest.importorskip("compressed_tensors", reason="comes with an engine")
    import serving_answers as answers  # type: ignore[import-not-found]  # as ``agents``

    one = [np.full(3, -np.log(8.0)), np.full(1, -np.log(8.0))]
    other = [np.full(3, -np.log(4.0)), np.full(1, -np.log(4.0))]
    assert answers.of_text(one) == pytest.approx(8.0)
    found = answers.perplexity_ratio(one, other)
    assert found == {"ratio": pytest.approx(2.0), "interval": pytest.approx([2, 2]), "changed": 1.0}
    assert answers.perplexity_ratio(one, one)["changed"] == 0.0
