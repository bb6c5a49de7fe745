"""The tables of docs/ that are made from the code that they describe.

    python -m docs.generate.reference     # brings the pages up to date

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ultraep_serve.config import BalanceConfig, SidecarSettings
from ultraep_serve.system.settings import choices_of, flag_of, range_of
from ultraep_serve.system.versions import PACKAGES
from ultraep_serve.types import ExpertShape, Policy

__all__ = ["DOCS", "TABLES", "help_text", "table", "table_in", "with_table"]

DOCS = Path(__file__).resolve().parents[1]
_DEFAULT = re.compile(r" \(default: ((?:[^()]|\([^()]*\))*)\)")
# an argument, two spaces or a line's end, and its text
_HELP_LINE = re.compile(r"^  (?! )(\S+(?: \S+)*)(?:  +|\n {6,})(\S.*)$", re.MULTILINE)


def help_text(*command: str) -> str:
    """What `ultraep-serve COMMAND --help` prints, no text broken into lines."""
    from ultraep_serve.cli import main

    printed = io.StringIO()
    wide = patch.dict(os.environ, COLUMNS="1000")
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def table_in(page: str, name: str) -> str:
    """The table of that name as ``page`` has it. Raises ValueError where there is no place."""
    found = _place(name).search(page)
    if found is None:
        raise ValueError(f"the page has no table {name!r}")
    return found[2]


def with_table(page: str, name: str, made: str) -> str:
    """``page`` with the table of that name replaced."""
    return _place(name).sub(lambda found: found[1] + made + found[3], page)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def _commands() -> str:
    listed = re.findall(r"^    (\S+)\s+(\S.*)$", help_text(), re.MULTILINE)
    return table(("command", ""), ((_code(name), text) for name, text in listed))


def _flags(*command: str) -> str:
    """Every argument of a command, as its help says."""
    rows, shown = [], help_text(*command)
    usage = shown.partition("\n\n")[0]
    for words, text in _HELP_LINE.findall(shown):
        flag = words.split(", ")[0]  # without other spellings of the same
        if flag != "-h":
            text = " ".join(text.split())
            found = _DEFAULT.search(text)
            is_required = re.search(rf"(?<!\[){re.escape(flag.split()[0])}(?![\w-])", usage)
            default = found[1] if found else "required" if is_required else ""
            rows.append((_code(flag), default, _DEFAULT.sub("", text)))
    escaped = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return table(("flag", "default", ""), escaped)


def _settings(settings: type[BalanceConfig] | type[SidecarSettings], prefix: str = "") -> str:
    rows = []
    for name, field in settings.model_fields.items():
        has_flag = (field.json_schema_extra or {}) != {"flag": False}
        flag = _code(flag_of(settings, name, prefix)) if has_flag else "none"
        text, _, said = (field.description or "").partition(" (default: ")
        default = said.rstrip(")") or _shown(field.default)
        rows.append((_code(name), flag, default, _range_of(field), text))
    return table(("setting", "flag", "default", "values", ""), rows)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default == "":
        return ""
    value = default.value if isinstance(default, Policy) else default
    return _code(f"{value:g}" if isinstance(value, float) else str(value))


def _range_of(field: Any) -> str:
    """The choices, or the limits of a number."""
    return ", ".join(map(_code, choices_of(field))) or range_of(field)


def _policies() -> str:
    from ultraep_lab.comparators import POLICIES

    served = {policy.value for policy in Policy}
    rows = [
        (_code(name), "server, replay" if name in served else "replay", policy.summary)
        for name, policy in POLICIES.items()
    ]
    return table(("policy", "where", ""), rows)


def _versions() -> str:
    rows = [
        (
            package.engine,
            package.runs_on,
            _code(package.name),
            ", ".join(map(_code, package.releases)),
            package.verified_by,
        )
        for package in PACKAGES
    ]
    return table(("engine", "on", "package and extra", "releases", "verified by"), rows)


_PAGES = {
    "/": "The page to look at.",
    "/openapi.json": "What every figure and parameter means, as OpenAPI.",
    "/static": "Files of the page.",
}


def _endpoints() -> str:
    with tempfile.TemporaryDirectory() as run_path:
        app = _sidecar(Path(run_path))
    rows = [
        (f"{_code(f'{method.upper()} {path}')}", _parameters(operation), _summary(operation))
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]
    others = [route.path for route in app.routes if route.path not in app.openapi()["paths"]]
    rows += [(_code(f"GET {path or '/'}"), "", _PAGES[path]) for path in sorted(others)]
    return table(("request", "parameters", ""), rows)


def _parameters(operation: Mapping[str, Any]) -> str:
    names = [given["name"] for given in operation.get("parameters", ()) if given["in"] == "query"]
    return ", ".join(map(_code, names))


def _summary(operation: Mapping[str, Any]) -> str:
    first_paragraph = operation["description"].split("\n\n")[0]
    return " ".join(first_paragraph.split()).replace("``", "`")


def _metrics() -> str:
    from fastapi.testclient import TestClient
    from prometheus_client.parser import text_string_to_metric_families

    from tests.support.rings import SyntheticRun

    with tempfile.TemporaryDirectory() as run_path:
        run = SyntheticRun(Path(run_path), ExpertShape(2, 8, 1), num_layers=1)
        run.batch()
        text = TestClient(_sidecar(Path(run_path))).get("/metrics").text
        run.close()
    rows = [
        (_code(_full_name(family)), family.type, _labels(family), family.documentation)
        for family in sorted(text_string_to_metric_families(text), key=lambda one: str(one.name))
    ]
    return table(("metric", "type", "labels", ""), rows)


def _full_name(family: Any) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def _labels(family: Any) -> str:
    names = {name for sample in family.samples for name in sample.labels if name != "le"}
    return ", ".join(map(_code, sorted(names)))


def _sidecar(run_path: Path) -> Any:
    from ultraep_serve.sidecar.app import create_app

    return create_app(run_path, "token")


def _code(text: str) -> str:
    return f"`{text}`"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table as Markdown."""
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "\n".join(lines) + "\n"


def _flags_of(*command: str) -> Callable[[], str]:
    return lambda: _flags(*command)


_COMMANDS = DOCS / "commands"
_FLAGS = {  # where the flags of a command stand
    **dict.fromkeys(("sidecar", "status", "doctor"), _COMMANDS / "serve.md"),
    **dict.fromkeys(("record", "make-trace"), DOCS / "traces.md"),
    "demo": _COMMANDS / "bench.md",
    "replay": _COMMANDS / "replay.md",
}
TABLES: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "commands": (_COMMANDS / "index.md", _commands),
    **{f"flags-{name}": (page, _flags_of(name)) for name, page in _FLAGS.items()},
    "flags-bench-prefill": (_COMMANDS / "bench.md", _flags_of("bench", "prefill")),
    "settings": (DOCS / "settings.md", lambda: _settings(BalanceConfig)),
    "sidecar-settings": (
        DOCS / "settings.md",
        lambda: _settings(SidecarSettings, "sidecar-"),
    ),
    "policies": (DOCS / "settings.md", _policies),
    "versions": (DOCS / "engines.md", _versions),
    "endpoints": (DOCS / "http.md", _endpoints),
    "metrics": (DOCS / "http.md", _metrics),
}


def main() -> None:
    """Write every table into its page."""
    for name, (page, make) in TABLES.items():
        page.write_text(with_table(page.read_text(), name, make()))


if __name__ == "__main__":
    main()
