"""README and docs say what is there: files, calls, settings, endpoints, metrics, figures."""

import json
import re
from pathlib import Path

import pytest

from tests.support import families_page
from tests.support.reference_page import PAGE, TABLES, help_text, table_in

ROOT = PAGE.parent.parent
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "dev" / "architecture.md"
MEASUREMENTS = ROOT / "docs" / "dev" / "measurements.md"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [README, ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE_BY_USERS = {"deploy/.env"}

_SPAN = re.compile(r"`([^`\n]+)`|\]\(([^)#]+)\)")  # code, or where a link points
_FILE = re.compile(r"[\w.-][\w./-]*\.(?:py|md|json|yaml|yml|toml|png)")
_UNDER_ROOT = re.compile(
    r"(?<![\w/.-])(?:ultraep_serve|kernels|benchmarks|deploy|docs|tests)/[\w./-]*\w"
)


def names_of_files(text: str) -> set[str]:
    """Paths under the repository's folders anywhere, and names of files in code and links."""
    words = [word for span in _SPAN.findall(text) for word in (span[0] or span[1]).split()]
    return {*_UNDER_ROOT.findall(text), *filter(_FILE.fullmatch, words)} - MADE_BY_USERS


def exists(name: str, page: Path) -> bool:
    """Whether ``page`` may call a file or folder ``name``; the map leaves folders out in places."""
    if any((folder / name).exists() for folder in (ROOT, page.parent, RESULTS, RESULTS.parent)):
        return True
    code = (ROOT / "ultraep_serve", ROOT / "kernels")
    return page == ARCHITECTURE and any(list(folder.rglob(name)) for folder in code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    names = names_of_files(page.read_text())
    missing = sorted(name for name in names if not exists(name, page))
    assert not missing, f"{page.name} names files that do not exist: {missing}"


def test_a_file_that_does_not_exist_is_noticed() -> None:
    text = "see `ultraep_serve/none.py`, `none.json`, [x](none.md) and cp deploy/none x"
    assert names_of_files(text) == {
        *("ultraep_serve/none.py", "none.json", "none.md", "deploy/none")
    }


def test_the_map_names_every_package_and_module() -> None:
    text = ARCHITECTURE.read_text()
    assert len(names_of_files(text)) > 60
    top = [path for path in (ROOT / "ultraep_serve").iterdir() if not path.name.startswith("_")]
    kernels = ROOT / "kernels" / "ultraep_kernels"
    top += [path for path in kernels.iterdir() if not path.name.startswith("_")]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in top} - {"py.typed"}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]
    stages = [path.stem for path in (kernels / "host").glob("[a-z]*.py")]
    assert not [name for name in sorted(stages) if f"`{name}`" not in text]


def test_calls_from_hook_to_planner_are_where_the_map_says() -> None:
    section = ARCHITECTURE.read_text().split("## From the engine's hook to the planner")[1]
    rows = [line for line in section.split("##")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 9
    for row in rows:
        _, calls, files = (cell.strip() for cell in row.strip("|").split(" | "))
        text = "".join((ROOT / file).read_text() for file in re.findall(r"`(.+?)`", files))
        first = calls.split(" around ")[0]  # behind it: what is hooked, the engine's
        for call in re.findall(r"`([A-Za-z_.]+)`", first):
            *owner, name = call.split(".")
            kind = "class" if name[0].isupper() else "def"
            assert re.search(rf"^ *{kind} {name}\b", text, re.MULTILINE), (call, files)
            assert not owner or f"class {owner[0]}" in text, (call, files)


@pytest.mark.parametrize("name", TABLES)
def test_the_reference_says_what_the_code_does(name: str) -> None:
    if name in ("endpoints", "metrics", "metrics-detail"):
        pytest.importorskip("fastapi", reason="the sidecar's packages are not installed")
        pytest.importorskip("httpx", reason="the client's packages are not installed")
    expected = TABLES[name]()
    assert expected.count("\n") > 3
    if table_in(PAGE.read_text(), name) != expected:
        pytest.fail(
            f"run `python -m tests.support.reference_page`; table {name!r} of {PAGE.name} must be\n"
            + expected
        )


def test_the_families_are_those_of_the_last_run() -> None:
    assert families_page.PAGE.read_text() == families_page.page(), (
        "run `python -m tests.support.families_page`"
    )


def test_no_family_is_without_a_verdict_and_its_reason() -> None:
    for engine in ("vllm", "sglang"):
        rows = json.loads((RESULTS / f"families-{engine}.json").read_text())["rows"]
        assert {row["family"] for row in rows} == set(families_page.FAMILIES)
        for row in rows:
            assert row["verdict"] in ("balanced", "refused", "unserved"), row
            assert (row["verdict"] == "balanced") != bool(row["reason"]), row


def test_the_reference_has_every_flag_of_a_server_and_a_sidecar() -> None:
    text = PAGE.read_text()
    for command in ("vllm", "sglang", "sidecar"):
        flags = set(re.findall(r"^  (--[a-z-]+)", help_text(command), re.MULTILINE))
        assert len(flags) > 4, command
        assert not [flag for flag in sorted(flags) if not re.search(rf"{flag}(?=[` ])", text)]


def test_the_reference_has_every_decision() -> None:
    window = pytest.importorskip("ultraep_serve.sidecar.statistics.window")
    text = PAGE.read_text()
    for decision in window.Decision:
        _, done, reason = window.outcome(decision)
        assert f"| `{done}` | `{reason}` |" in text


def test_the_pages_show_what_benchmarks_and_demo_wrote() -> None:
    for package in ("httpx", "rich", "scipy"):
        pytest.importorskip(package, reason="the client's packages are not installed")
    from tests.support import results_page as pages

    for path, updated in ((README, pages.readme), (MEASUREMENTS, pages.measurements)):
        text = path.read_text()
        assert updated(text) == text, "run `python -m tests.support.results_page`"
    assert all(table_in(MEASUREMENTS.read_text(), name) for name in pages.TIMES)
