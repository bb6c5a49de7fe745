"""README and docs say what is there: files, calls, settings, endpoints, metrics, figures."""

import ast
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from docs.generate import families as family_pages
from docs.generate import gpus as gpu_page
from docs.generate import releases, samples
from docs.generate.reference import DOCS, TABLES, help_text, table_in

ROOT = DOCS.parent
README = ROOT / "README.md"
ARCHITECTURE = DOCS / "dev" / "architecture.md"
RESULTS = ROOT / "benchmarks" / "results"
CODE = (ROOT / "ultraep_serve", ROOT / "kernels", ROOT / "benchmarks" / "ultraep_lab")
CHANGELOG = ROOT / "CHANGELOG.md"
OTHERS = [ROOT / folder / "README.md" for folder in ("deploy", "benchmarks")]
PAGES = [README, CHANGELOG, *OTHERS, *sorted(DOCS.rglob("*.md"))]
MADE_BY_USERS = {"deploy/.env", "check-gpu.json", "check-gpu.md"}

_SPAN = re.compile(r"`([^`\n]+)`|\]\(([^)#]+)\)")  # code, or where a link points
_FILE = re.compile(r"[\w.-][\w./-]*\.(?:py|md|js|html|json|yaml|yml|toml|png|svg)")
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
    return page == ARCHITECTURE and any(list(folder.rglob(name)) for folder in CODE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    names = names_of_files(page.read_text())
    missing = sorted(name for name in names if not exists(name, page))
    assert not missing, f"{page.name} names files that do not exist: {missing}"


_HEAD = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]*)\)")


def anchors(page: Path) -> set[str]:
    """Where a code host lets links lead to."""
    heads = _HEAD.findall(page.read_text())
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """On a code host; the site's generator refuses dead ones in it, and does not see README.md."""
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        if not link.startswith("https://"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_map_names_every_package_and_module() -> None:
    text = ARCHITECTURE.read_text()
    assert len(names_of_files(text)) > 60
    top = [path for path in (ROOT / "ultraep_serve").iterdir() if not path.name.startswith("_")]
    kernels = ROOT / "kernels" / "ultraep_kernels"
    top += [path for path in kernels.iterdir() if not path.name.startswith("_")]
    names = {f"{path.name}/" if path.is_dir() else path.name for path in top} - {"py.typed"}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]
    stages = [path.stem for path in (kernels / "host").glob("[a-z]*.py")]
    page = [path.name for path in (ROOT / "ultraep_serve/sidecar/static").glob("*.js")]
    assert not [name for name in sorted(stages + page) if f"`{name}`" not in text]


def test_calls_from_dispatch_to_planner_are_where_the_map_says() -> None:
    section = ARCHITECTURE.read_text().split("## From the engine's dispatch to the planner")[1]
    rows = [line for line in section.split("##")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 7
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
    if name in ("endpoints", "metrics") or name.startswith("flags-"):
        pytest.importorskip("fastapi", reason="the sidecar's packages are not installed")
        pytest.importorskip("httpx", reason="the client's packages are not installed")
        pytest.importorskip("rich", reason="the client's packages are not installed")
    page, make = TABLES[name]
    expected = make()
    assert expected.count("\n") > 3
    if table_in(page.read_text(), name) != expected:
        pytest.fail(
            f"run `python -m docs.generate.reference`; table {name!r} of {page.name} must be\n"
            + expected
        )


def test_every_result_of_a_benchmark_has_its_command() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text()
    patterns = re.findall(r"`([\w*.-]+\.json)`", table)
    results = [path.name for path in RESULTS.glob("*.json")]
    assert not [name for name in results if not any(fnmatch(name, each) for each in patterns)]


def test_every_command_is_on_a_page() -> None:
    index = (DOCS / "commands" / "index.md").read_text()
    pages = [(DOCS / "commands" / link).read_text() for link in _LINK.findall(index)]
    for command in re.findall(r"^\| `([a-z-]+)` \|", index, re.MULTILINE):
        assert any(f"ultraep-serve {command}" in page or f"`{command}`" in page for page in pages)


def literals(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; of an f-string the pieces between its values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_troubleshooting_has_the_messages_of_the_code() -> None:
    """Each begins or goes on as the code says it, in twelve characters or more."""
    files = [file for folder in CODE for file in folder.rglob("*.py")]
    said = {text.strip() for file in files for text in literals(ast.parse(file.read_text()))}
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| (?:503 |421 |401 )?`([^`]+)`", page, re.MULTILINE)
    assert len(messages) > 25
    for message in messages:
        parts = [part.strip() for part in message.split("...")]
        assert any(
            (len(text) >= 12 and text in message)
            or any(len(part) >= 12 and part in text for part in parts)
            for text in said
        ), message


def test_the_families_are_those_of_the_last_run() -> None:
    made = family_pages.page()
    assert family_pages.PAGE.read_text() == made, "run `python -m docs.generate.families`"


def test_the_releases_of_engines_are_those_of_the_last_run() -> None:
    page = releases.PAGE.read_text()
    for name, made in releases.tables().items():
        assert table_in(page, name) == made, "run `python -m docs.generate.releases`"


def test_the_page_on_gpus_shows_what_was_measured_on_one() -> None:
    page, remedy = gpu_page.PAGE.read_text(), "run `python -m docs.generate.gpus`"
    for name, made in gpu_page.TABLES.items():
        assert table_in(page, name) == made(), remedy


@pytest.mark.parametrize("page", samples.PAGES, ids=lambda page: page.name)
def test_outputs_are_those_of_one_run(page: Path) -> None:
    pytest.importorskip("rich", reason="the client's packages are not installed")
    text = page.read_text()
    assert "<!-- sample " in text
    assert samples.with_samples(text) == text, "run `python -m docs.generate.samples`"


def test_no_family_is_without_a_verdict_and_its_reason() -> None:
    for engine in ("vllm", "sglang"):
        rows = json.loads((RESULTS / f"families-{engine}.json").read_text())["rows"]
        assert {row["family"] for row in rows} == set(family_pages.FAMILIES)
        for row in rows:
            assert row["verdict"] in ("balanced", "refused", "unserved"), row
            assert (row["verdict"] == "balanced") != bool(row["reason"]), row


def test_the_reference_has_every_flag_of_a_server() -> None:
    text = (DOCS / "settings.md").read_text()
    for command in ("vllm", "sglang"):
        flags = set(re.findall(r"^  (--[a-z-]+)", help_text(command), re.MULTILINE))
        assert len(flags) > 4, command
        assert not [flag for flag in sorted(flags) if not re.search(rf"{flag}(?=[` ])", text)]


def test_the_reference_has_every_decision() -> None:
    figures = pytest.importorskip("ultraep_serve.sidecar.figures")
    text = (DOCS / "http.md").read_text()
    for decision in figures.Decision:
        _, done, reason = figures.decision_names(decision)
        assert f"| `{done}` | `{reason}` |" in text


def test_the_pages_show_what_benchmarks_and_demo_wrote() -> None:
    for package in ("httpx", "rich", "scipy"):
        pytest.importorskip(package, reason="the client's packages are not installed")
    from docs.generate import results

    for path in results.PAGES:
        assert results.updated(path) == path.read_text(), f"run `python -m {results.__name__}`"
    for path, said in results.statements().items():
        text = " ".join(path.read_text().split())
        assert not [words for words in said if words not in text], path
