"""Command lines of the engines' own guides: of each, ``docs/recipes.md`` says what comes."""

import re
import shlex
from types import ModuleType

import pytest

from tests.support.engine_flags import run_reader
from tests.support.published_lines import PAGE, ROWS, Row
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.launcher import engine, sglang, vllm
from ultraep_serve.launcher.engine import read_flags

ROOT = PAGE.parents[1]
OUR_PAGES = [ROOT / "README.md", *(PAGE.with_name(f"{name}.md") for name in ("choosing", "gpus"))]
OUR_LINES = {
    found.replace("\\\n", " ")
    for page in OUR_PAGES
    for found in re.findall(
        r"^ultraep-serve ((?:vllm|sglang) \w[\w.-]*/(?:.*\\\n)*.*)$", page.read_text(), re.MULTILINE
    )
}
LAUNCHERS: dict[str, ModuleType] = {"vllm": vllm, "sglang": sglang}


@pytest.fixture(autouse=True)
def _engines_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run_reader", run_reader)
    monkeypatch.setattr(vllm, "_is_cpu_build", lambda: False)
    for launcher in LAUNCHERS.values():
        monkeypatch.setattr(launcher, "require_fit_packages", lambda _: [])


def refusal(row: Row, words: list[str]) -> str:
    """What the launcher says against ``words``, which the engine's parser takes; or nothing."""
    parsed = read_flags(row.engine, words)
    try:
        LAUNCHERS[row.engine].engine_command(parsed, words, BalanceConfig())
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("row", ROWS, ids=[f"{n}-{row.engine}" for n, row in enumerate(ROWS)])
def test_the_page_says_what_comes_of_a_published_line(row: Row) -> None:
    how, _, reason = row.result.partition(": ")
    said = refusal(row, row.words)
    if how == "refused":
        assert reason in said
    else:
        assert not said
        assert how == "accepted" or how.startswith("refused at load (")
    if row.accepted_with:
        assert not refusal(row, [*row.words, *row.accepted_with.split()])


@pytest.mark.parametrize("line", sorted(OUR_LINES))
def test_lines_that_our_own_pages_print_are_accepted(line: str) -> None:
    engine, model, *words = shlex.split(line)
    more = ["--device", "cuda"] if engine == "sglang" else []
    row = Row("", f"{engine} serve", "accepted", "")
    assert not refusal(row, ["--model", model, *words, *more])
