"""`ultraep-serve bench load` with a fake load generator, engine and sidecar."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_fakes import TOKEN, FakeDeployment, deployed, engine_app, serving, tokenize
from tests.support.fake_aiperf import FakeAIPerf
from ultraep_lab.bench import load_report
from ultraep_lab.bench.aiperf import (
    AIPerf,
    Answer,
    Conversation,
    Turn,
    WindowFigures,
    read_answers,
)
from ultraep_lab.bench.load import LoadOptions, LoadRun, LoadWindow, traffic
from ultraep_lab.bench.load_report import load_document, load_picture
from ultraep_lab.bench.prompts import CommonWords
from ultraep_serve.cli import execute, main
from ultraep_serve.errors import BenchError, ConfigError, UltraEPError

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def running() -> Iterator[FakeDeployment]:
    with deployed(FakeDeployment()) as deployment:
        yield deployment


@pytest.fixture
def fake(running: FakeDeployment) -> FakeDeployment:
    running.reset()
    return running


@pytest.fixture
def aiperf(fake: FakeDeployment, tmp_path: Path) -> FakeAIPerf:
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeAIPerf(folder, fake.sidecar_url, fake.delays)


def words(fake: FakeDeployment, aiperf: FakeAIPerf, *flags: str) -> list[str]:
    given = ["--url", fake.url, "--sidecar", fake.sidecar_url, "--token", TOKEN]
    small = ["--rates", "1,2", "--requests", "4", "--repeats", "2", "--warmup", "1"]
    small += ["--prompt-median", "40", "--prompt-p90", "60", "--aiperf", str(aiperf.path)]
    return ["bench", "load", *given, *small, *flags]


def test_curves_of_every_policy(fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path) -> None:
    path, raw, plots = tmp_path / "result.json", tmp_path / "raw", tmp_path / "plots"
    flags = ("--json", str(path), "--raw", str(raw), "--plots", str(plots))
    assert execute(words(fake, aiperf, *flags)) == 0
    document = json.loads(path.read_text())
    assert document["complete"]
    assert document["load_generator"] == "aiperf 0.13.0"
    assert (document["model"], document["url"]) == ("fake/model", fake.url)
    assert [(w["contender"], w["rate"], w["repeat"]) for w in document["windows"]] == [
        *(("off", 1, 1), ("quota", 1, 1), ("quota", 2, 1), ("off", 2, 1)),
        *(("off", 1, 2), ("quota", 1, 2), ("quota", 2, 2), ("off", 2, 2)),
    ]
    rows = {(row["contender"], row["rate"]): row for row in document["rows"]}
    for rate in (1, 2):
        off, quota = rows["off", rate], rows["quota", rate]
        assert quota["ttft_mean_seconds"]["mean"] < off["ttft_mean_seconds"]["mean"]
        low, high = off["ttft_p99_seconds"]["interval"]
        assert low <= off["ttft_p99_seconds"]["mean"] <= high
        ratio = quota["over"]["off"]["ttft_mean_seconds"]
        assert ratio["mean"] == pytest.approx(fake.delays["quota"] / fake.delays["off"])
        assert ratio["interval"] == pytest.approx([ratio["mean"]] * 2)
        assert off["over"] == {}
    assert rows["off", 2]["ttft_mean_seconds"]["mean"] > rows["off", 1]["ttft_mean_seconds"]["mean"]
    assert len(list(raw.glob("*/profile_export_aiperf.json"))) == 8
    assert (raw / "quota-2-1" / "console.txt").exists()
    assert b"<svg" in (plots / "result.svg").read_bytes()
    assert (fake.policy, fake.policies_set[-1]) == ("quota", "quota")


def test_contenders_get_the_same_traffic(fake: FakeDeployment, aiperf: FakeAIPerf) -> None:
    execute(words(fake, aiperf, "--requests", "6"))
    off, quota, faster, _, other, *_ = (call["rows"] for call in aiperf.calls)
    times = [row["timestamp"] for row in off]
    assert times == [row["timestamp"] for row in quota] == sorted(times)
    assert times[0] == 0
    assert times[-1] < 6000
    assert [row["timestamp"] for row in faster] == pytest.approx(
        [time / 2 for time in times], abs=0.002
    )
    prompts = [[tokenize(row["text_input"]) for row in rows] for rows in (off, quota, faster)]
    assert len({tuple(map(len, each)) for each in prompts}) == 1
    for one, another in zip(*prompts[:2], strict=True):
        assert one != another  # so that no prefix cache finds it
        assert " ".join(one[10:30]) in " ".join(another)
    assert times != [row["timestamp"] for row in other]  # the next repeat's
    assert {row["output_length"] for row in off} == {64}


def test_the_load_generator_is_kept_apart(
    fake: FakeDeployment, aiperf: FakeAIPerf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # with which it would not load a local tokenizer
    monkeypatch.setenv("ULTRAEP_CONTROL_TOKEN", TOKEN)
    execute(words(fake, aiperf, "--rates", "1", "--repeats", "1", "--ttft-objective", "0.5"))
    call = aiperf.calls[0]
    assert not {"HF_HUB_OFFLINE", "ULTRAEP_CONTROL_TOKEN"} & set(call["environment"])
    assert TOKEN not in json.dumps(call)
    assert "time_to_first_token:500" in call["words"]
    for word in ("--fixed-schedule", "ignore_eos:true", "--streaming"):
        assert word in call["words"]


def test_conversations(fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path) -> None:
    turns = (Turn(0.0, "first", 5), Turn(0.25, "second", 6))
    conversations = [Conversation("tools", turns), Conversation("tools", turns[:1])]
    figures = AIPerf(str(aiperf.path)).converse(
        fake.url, "fake/model", conversations, 2, Answer(1.5, 0.015), 9.0, tmp_path / "kept"
    )
    assert figures.lag_p99_seconds is None
    answers = read_answers(tmp_path / "kept")
    assert answers == [Answer(pytest.approx(figures.ttft_mean_seconds), 0.01)] * 3
    call = aiperf.calls[0]
    assert call["rows"][0]["turns"] == [
        {"role": "system", "text": "tools"},
        {"text": "first", "delay": 0, "output_length": 5},
        {"text": "second", "delay": 250, "output_length": 6},
    ]
    assert "time_to_first_token:1500 inter_token_latency:15" in call["words"]
    assert not {"--fixed-schedule", "completions"} & set(call["words"])


def test_conversations_without_an_answer(fake: FakeDeployment, aiperf: FakeAIPerf) -> None:
    aiperf.plans(wrong="requests", wrong_window=1)
    conversation = Conversation("tools", (Turn(0.0, "first", 5), Turn(0.0, "second", 5)))
    with pytest.raises(BenchError, match="1 of 2 requests failed: Internal Server Error"):
        AIPerf(str(aiperf.path)).converse(
            fake.url, "fake/model", [conversation], 1, Answer(1.5, 0.015), 9.0
        )


def test_traffic_is_poisson_and_lognormal() -> None:
    options = LoadOptions(requests=5_000, prompt_median=500, prompt_p90=1500)
    drawn = traffic(options, 0, None)
    assert drawn == traffic(options, 0, None)
    assert drawn.arrivals != traffic(options, 1, None).arrivals
    assert np.percentile(drawn.prompt_tokens, [50, 90]) == pytest.approx([500, 1500], rel=0.05)
    gaps = np.diff(drawn.arrivals) * options.requests
    assert np.mean(gaps) == pytest.approx(1.0, rel=0.01)
    assert np.std(gaps) == pytest.approx(1.0, rel=0.05)  # as an exponential's
    limited = traffic(options, 0, 1000).prompt_tokens
    assert max(limited) == 1000
    assert min(limited) >= 32


def test_bursts_keep_the_rate() -> None:
    options = LoadOptions(requests=20_000, burstiness=0.25)
    gaps = np.diff(traffic(options, 0, None).arrivals) * options.requests
    assert np.mean(gaps) == pytest.approx(1.0, rel=0.01)
    assert np.std(gaps) == pytest.approx(2.0, rel=0.05)  # of a gamma: 1 / shape ** 0.5
    with pytest.raises(ConfigError, match=r"burstiness = 0\.0 must be 0\.01 or more"):
        LoadOptions(burstiness=0.0)


def test_texts_in_turn(fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path) -> None:
    flags = []
    for name in ("alpha", "beta"):
        (tmp_path / name).write_text(" ".join(f"{name}{i}" for i in range(100)))
        flags += ["--text-file", str(tmp_path / name)]
    execute(words(fake, aiperf, *flags, "--requests", "6", "--rates", "1", "--repeats", "1"))
    for call in aiperf.calls:
        texts = [row["text_input"] for row in call["rows"]]
        assert [("alpha" in text, "beta" in text) for text in texts] == [
            *[(True, False)] * 3,
            *[(False, True)] * 3,
        ]


def test_how_many_more_requests(aiperf: FakeAIPerf) -> None:
    options = LoadOptions(rates=(1.0, 2.0, 3.0), ttft_objective=1.0)
    run = LoadRun(AIPerf(str(aiperf.path)), [CommonWords()], options)
    figures = WindowFigures(*(0.1 * number for number in range(1, 17)))
    crossings = {"off": 1.5, "quota": 2.25}  # where the mean TTFT is 1 s, in every repeat
    for repeat in range(3):
        for name, crossing in crossings.items():
            for rate in options.rates:
                mean = 1.0 + (rate - crossing) / 2
                there = replace(figures, ttft_mean_seconds=mean)
                run.windows.append(LoadWindow(name, rate, repeat, there))
    rates = {
        (found["figure"], found["limit_seconds"]): found
        for found in load_document(run, ("off", "quota"), {})["greatest_rates"]
    }
    mean = rates["ttft_mean_seconds", 1.0]
    assert {name: one["rate"] for name, one in mean["rates"].items()} == crossings
    assert mean["quota_over"]["off"]["mean"] == pytest.approx(1.5)
    assert mean["quota_over"]["off"]["interval"] == pytest.approx([1.5, 1.5])
    p99 = rates["ttft_p99_seconds", 1.0]
    assert p99["rates"]["off"] == {"rate": None, "is": "above", "limit": 3.0}
    assert p99["quota_over"] == {"off": None}


def test_prompts_fit_the_context(fake: FakeDeployment, aiperf: FakeAIPerf) -> None:
    fake.context = 120
    execute(words(fake, aiperf, "--requests", "40", "--rates", "1", "--repeats", "1"))
    longest = max(len(tokenize(row["text_input"])) for row in aiperf.calls[0]["rows"])
    assert longest == 120 - 64


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ((0.5, 0.9, 1.3), {"rate": 3.0, "is": "between", "limit": 4.0}),
        ((0.5, 0.9, 0.95), {"rate": None, "is": "above", "limit": 4.0}),
        ((1.5, 0.9, 1.3), {"rate": None, "is": "below", "limit": 1.0}),
        ((0.5, 1.5, 0.4), {"rate": 1.5, "is": "between", "limit": 2.0}),  # the first crossing
        ((), None),
    ],
)
def test_greatest_rate(means: tuple[float, ...], expected: dict[str, Any] | None) -> None:
    curve = list(zip((1.0, 2.0, 4.0), means, strict=False))
    if means == (0.5, 0.9, 1.3):
        assert load_report._crossing(curve, 1.1) == pytest.approx(expected)
    else:
        assert load_report._crossing(curve, 1.0) == expected


def test_interval_over_repeats_is_students() -> None:
    """Of 1, 2, 3: 2 +- 4.303 / sqrt(3)."""
    assert load_report._interval([1.0, 2.0, 3.0]) == pytest.approx([-0.4841, 4.4841], abs=1e-4)
    assert load_report._interval([1.0]) is None


def test_picture_is_reproducible(aiperf: FakeAIPerf) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    run = LoadRun(AIPerf(str(aiperf.path)), [CommonWords()], LoadOptions(rates=(1.0, 2.0)))
    figures = WindowFigures(*(0.1 * number for number in range(1, 17)))
    run.windows += [
        LoadWindow(name, rate, 0, figures) for name in ("off", "x") for rate in (1.0, 2.0)
    ]
    document = load_document(run, ("off", "x"), {})
    assert not document["complete"]
    picture = load_picture(document)
    assert picture == load_picture(document)
    assert b"<dc:date>" not in picture


def test_objective_that_is_never_met(
    fake: FakeDeployment, aiperf: FakeAIPerf, capsys: pytest.CaptureFixture[str]
) -> None:
    execute(words(fake, aiperf, "--ttft-objective", "0.001"))
    shown = capsys.readouterr().out
    assert "mean TTFT within 0.001 s up to: off never, from 1/s, quota never" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_busy_machine_is_named(
    fake: FakeDeployment, aiperf: FakeAIPerf, capsys: pytest.CaptureFixture[str]
) -> None:
    aiperf.plans(lag_ms=250.0)
    execute(words(fake, aiperf, "--repeats", "1"))
    assert "In 4 of 4 windows some requests were sent more than 0.1 s late" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("exit", "off at 1 requests/s: aiperf measured nothing: .*dataset was not configured"),
        ("requests", "2 of 4 requests failed: Internal Server Error; read the server's log"),
        ("unknown", "fortnights, not ms"),
    ],
)
def test_failure_keeps_what_was_measured(
    fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path, wrong: str, message: str
) -> None:
    aiperf.plans(wrong=wrong, wrong_window=5)
    path, raw = tmp_path / "result.json", tmp_path / "raw"
    with pytest.raises(BenchError, match=message):
        execute(words(fake, aiperf, "--json", str(path), "--raw", str(raw)))
    document = json.loads(path.read_text())
    assert not document["complete"]
    assert len(document["windows"]) == 4
    assert (raw / "off-1-2" / "console.txt").exists()  # of the window that failed
    assert fake.policy == "quota"


def test_failure_in_the_first_window_writes_nothing(
    fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path
) -> None:
    aiperf.plans(wrong="exit", wrong_window=1)
    assert main(words(fake, aiperf, "--json", str(tmp_path / "result.json"))) == 2
    assert not (tmp_path / "result.json").exists()


def test_ctrl_c_keeps_what_was_measured_and_ends_the_load_generator(
    fake: FakeDeployment, aiperf: FakeAIPerf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aiperf.plans(wrong="hang", wrong_window=3)
    path = tmp_path / "result.json"
    assert main(words(fake, aiperf, "--json", str(path))) == 130
    assert len(json.loads(path.read_text())["windows"]) == 2
    assert "Not complete" in capsys.readouterr().out
    assert fake.policy == "quota"
    child = int((aiperf.folder / "child").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_server_that_is_lost(
    fake: FakeDeployment,
    aiperf: FakeAIPerf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(serving(engine_app(fake)))

        def lost(*_: Any) -> WindowFigures:
            stack.close()
            raise BenchError("4 of 4 requests failed: connection refused")

        monkeypatch.setattr(AIPerf, "measure", lost)
        with pytest.raises(BenchError, match=r"engine's server .* cannot be reached .*start it"):
            execute(words(fake, aiperf, "--url", url))
    assert fake.policy == "quota"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rates", "0"), "--rates = 0 must be more than 0"),
        (("--rates", "1,-2"), "--rates = -2 must be more than 0"),
        (("--rates", "nan"), "--rates = nan must be"),
        (("--rates", "fast"), "--rates = fast must be a number, more than 0"),
        (("--rates", ""), "--rates must name at least one"),
        (("--rates", "2,1"), "must grow"),
        (("--requests", "1"), "--requests = 1 must be 2 or more"),
        (("--repeats", "0"), "--repeats = 0 must be 1 or more"),
        (("--output-tokens", "1"), "--output-tokens = 1 must be 2 or more"),
        (("--prompt-median", "9"), "--prompt-median = 9 must be 32 or more"),
        (("--prompt-p90", "39"), "--prompt-p90 must be --prompt-median or more"),
        (("--prompt-median", "4090", "--prompt-p90", "5000"), "does not fit the server's context"),
        (("--ttft-objective", "0"), "--ttft-objective = 0 must be more than 0, at most 604800"),
        (("--policies", "off,off"), "--policies"),
        (("--sidecar", NOWHERE), "sidecar .* cannot be reached .*--sidecar"),
        (("--url", NOWHERE), "engine's server .* cannot be reached .*--url"),
        (("--aiperf", "/nowhere/aiperf"), r"is no program here; .*pip install 'aiperf==0.13.\*'"),
        (("--aiperf", "/bin/false"), "--version failed"),
        (("--json", "/proc/nowhere/result.json"), "cannot be written"),
        (("--raw", "/proc/nowhere"), "cannot be written"),
        (("--plots", "/proc/nowhere"), "cannot be written"),
    ],
)
def test_errors_say_what_to_do(
    fake: FakeDeployment, aiperf: FakeAIPerf, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UltraEPError, match=message):
        execute(words(fake, aiperf, *flags))
    assert aiperf.calls == []
    assert fake.policy == "quota"


def test_another_release_is_refused(fake: FakeDeployment, aiperf: FakeAIPerf) -> None:
    aiperf.plans(version="0.14.1")
    with pytest.raises(ConfigError, match=r"is AIPerf 0\.14\.1, not 0\.13"):
        execute(words(fake, aiperf))
