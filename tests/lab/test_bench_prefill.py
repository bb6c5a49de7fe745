"""`ultraep-serve bench prefill` against fake servers that answer faster the better the policy."""

import itertools
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench_fakes import TOKEN, FakeDeployment, deployed, tokenize
from ultraep_lab.bench import sidecar
from ultraep_lab.bench.prefill import balanced_orders, median_interval
from ultraep_lab.errors import BenchError
from ultraep_serve.cli import execute
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.system.environment import TOKEN_VARIABLE
from ultraep_serve.types import Policy

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


@pytest.fixture(scope="module")
def running() -> Iterator[FakeDeployment]:
    with deployed(FakeDeployment()) as deployment:
        yield deployment


@pytest.fixture
def fake(running: FakeDeployment, monkeypatch: pytest.MonkeyPatch) -> FakeDeployment:
    monkeypatch.setattr(sidecar, "_CATCH_UP_SECONDS", 0.1)  # the fake's answers are never late
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    running.reset()
    return running


def words(fake: FakeDeployment, *flags: str) -> list[str]:
    given = ["--url", fake.url, "--sidecar", fake.sidecar_url]
    small = ["--prompt-tokens", "64", "--repeats", "2", "--warmup", "1"]
    small += ["--policies", "off,quota,ideal"]
    return ["bench", "prefill", *given, *small, *flags]


def run(fake: FakeDeployment, *flags: str) -> int:
    return execute(words(fake, *flags))


def measured(fake: FakeDeployment, path: Path, *flags: str) -> dict[str, Any]:
    assert run(fake, "--json", str(path), *flags) == 0
    document = json.loads(path.read_text())
    assert isinstance(document, dict)
    return document


def test_faster_policy_measures_faster(fake: FakeDeployment, tmp_path: Path) -> None:
    flags = ("--prompt-tokens", "64,128", "--repeats", "3")
    fake.delays.update(off=0.4, quota=0.25, ideal=0.1)  # further apart than a busy machine's
    document = measured(fake, tmp_path / "new" / "result.json", *flags)
    assert [row["requested_tokens"] for row in document["rows"]] == [64, 128]
    for row in document["rows"]:
        times = row["ttft_seconds"]
        assert times["off"] > times["quota"] > times["ideal"] > 0
        assert row["speedup"] == pytest.approx(times["off"] / times["quota"])
        assert row["efficiency"] == pytest.approx(times["ideal"] / times["quota"])
        assert 0 < row["recovered"] < 1
        assert row["paired"]["quota_over_off"]["median"] < 1
        assert row["paired"]["quota_over_off"]["interval"] is None  # three rounds cannot tell
        assert row["prompt_tokens"] == row["requested_tokens"]
        assert [len(samples) for samples in row["ttft_samples"].values()] == [3, 3, 3]
        spread = row["ttft_spread"]["off"]
        assert spread["min"] <= spread["p25"] <= times["off"] <= spread["p75"] <= spread["max"]


def test_interval_of_the_median_needs_no_distribution() -> None:
    """Of eleven samples the second and the second last: 1 - 2 * (1 + 11) / 2**11 = 0.988."""
    samples = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.09, 50.0]
    assert median_interval(samples) == (1.01, 1.09)
    assert median_interval(samples[:5]) is None


def test_prompts_differ_from_the_first_token_on(fake: FakeDeployment) -> None:
    run(fake, "--repeats", "4")
    prompts = [tokenize(prompt) for _, prompt in fake.prompts]
    assert len({words[0] for words in prompts}) == len(prompts) == 15
    assert {len(words) for words in prompts} == {64}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_variant_has_every_place_and_predecessor_equally_often(count: int) -> None:
    orders = balanced_orders(list("abcde"[:count]))
    assert all(sorted(order) == list("abcde"[:count]) for order in orders)
    for place in range(count):
        assert set(Counter(order[place] for order in orders).values()) == {len(orders) // count}
    followed = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(followed) == count * (count - 1)
    assert len(set(followed.values())) <= 1


def test_text_file_is_what_is_sent(fake: FakeDeployment, tmp_path: Path) -> None:
    text = tmp_path / "law.txt"
    text.write_text("whereas the party of the first part shall indemnify\n" * 3)
    run(fake, "--text-file", str(text), "--repeats", "1")
    known = set(tokenize(text.read_text()))
    whole = [prompt for _, prompt in fake.prompts]
    assert all(len(tokenize(prompt)) == 64 for prompt in whole)
    assert sum(word in known for prompt in whole for word in tokenize(prompt)) > 0.8 * 64 * 6


def test_policy_is_restored_after_an_error(fake: FakeDeployment) -> None:
    fake.policy, fake.fail_after = "off", 4
    with pytest.raises(BenchError, match="worker died"):
        run(fake, "--policies", "quota,ideal")
    assert fake.policy == "off"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_policy_is_restored_after_signals(fake: FakeDeployment, number: signal.Signals) -> None:
    """Also where others follow the first, as when a terminal is closed or a pod is stopped."""
    fake.policy = "off"
    command = words(fake, "--policies", "quota,ideal", "--repeats", "100000")
    running = subprocess.Popen([sys.executable, "-m", "ultraep_serve.cli", *command], stderr=-1)
    while "ideal" not in fake.policies_set:
        assert running.poll() is None
        time.sleep(0.01)
    for each in (number, signal.SIGTERM, signal.SIGHUP):
        running.send_signal(each)
    assert running.communicate()[1].splitlines()[-1:] == [b"ultraep-serve: interrupted"]
    assert running.returncode == 130
    assert (fake.policy, fake.policies_set[-1]) == ("off", "off")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", NOWHERE), "engine's server .* cannot be reached .*--url"),
        (("--sidecar", NOWHERE), "sidecar .* cannot be reached .*--sidecar"),
        (("--token-file", "guess"), "401: wrong token; .*--token"),
        (("--model", "other"), "choose from .*fake/model"),
        (("--policies", "off,fast"), "--policies = fast must be 'off', 'quota' or 'ideal'"),
        (("--policies", "off,off"), "--policies"),
        (("--policies", ""), "--policies"),
        (("--prompt-tokens", "9999"), "does not fit the server's context of 4096"),
        (("--prompt-tokens", "many"), "must be a whole number"),
        (("--prompt-tokens", "2"), "greater than or equal to 32"),
        (("--repeats", "0"), "must be 1 or more"),
        (("--url", "localhost:8000"), "must be http://HOST:PORT"),
        (("--text-file", "/nowhere/text"), "cannot be read"),
        (("--json", "/proc/nowhere/result.json"), "cannot be written"),
    ],
)
def test_errors_say_what_to_do(
    fake: FakeDeployment,
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guess").write_text("guess")
    with pytest.raises(UltraEPError, match=message):
        run(fake, *flags)
    assert fake.policy == "quota"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ({"allow_ideal": False}, r"409: policy ideal is not allowed; .*--allow-ideal"),
        ({"policy": None}, "--policy off"),  # started without balancing
        (
            {"context": None, "hidden_context": 60},
            r"maximum context length is 60 .*--max-model-len",
        ),
        ({"one_token": True}, "--text-file"),  # its tokenizer knows no word
    ],
)
def test_what_a_server_cannot_do_is_an_error(
    fake: FakeDeployment, server: dict[str, Any], error: str
) -> None:
    vars(fake).update(server)
    before = fake.policy
    with pytest.raises((BenchError, ConfigError), match=error):
        run(fake)
    assert fake.policy == before


def test_a_server_that_switched_itself_off_keeps_its_doubt(
    fake: FakeDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a measurement, and when it happens while policies are set."""
    set_policy = sidecar.Sidecar.set_policy

    def set_and_fail(self: sidecar.Sidecar, policy: Policy) -> None:
        set_policy(self, policy)
        fake.doubt = "a check failed"

    monkeypatch.setattr(sidecar.Sidecar, "set_policy", set_and_fail)
    for _ in range(2):
        with pytest.raises(BenchError, match="/v1/balance: a check failed"):
            run(fake)
        assert len(fake.policies_set) == 1
