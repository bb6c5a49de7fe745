"""docs/dev/faults.md is whole, names tests that exist, and what it says of clocks."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "dev" / "faults.md").read_text()
FAULTS = ["SIGKILL", "SIGSTOP", "segfault", "disk", "shared", "run", "ring", "clock"]
STAGES = ["start", "load", "exchange", "replicate", "wait", "compute", "policy switch", "stop"]
ROLES = ["A rank", "The launcher", "The sidecar", "The API server", "Another host"]
OUTCOMES = {"ends", "on", "refused", "waits", "told"}

_CELL = re.compile(r"(\w+) \d+(?:, \d+)*")
_WALL_CLOCK = re.compile(r"\btime\.time(?:_ns)?\(|datetime\.|localtime|gmtime")


def rows_of(role: str) -> list[list[str]]:
    """Cells of the table of ``role``, its head first."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith(role))
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("role", ROLES)
def test_every_fault_has_a_cell_in_every_stage(role: str) -> None:
    head, *rows = rows_of(role)
    assert head == ["fault", *STAGES]
    own = ["link"] if role == "Another host" else []
    assert [row[0].split()[0] for row in rows] == own + FAULTS
    assert {len(row) for row in rows} == {len(head)}
    for cell in (cell for row in rows for cell in row[1:]):
        assert cell == "\N{EN DASH}" or (
            (found := _CELL.fullmatch(cell)) is not None and found[1] in OUTCOMES
        ), cell


def test_every_test_that_is_named_exists_and_every_number_leads_to_one() -> None:
    listed = re.findall(r"^(\d+)\. `(.+?)::(\w+)`", PAGE.split("## Tests")[1], re.MULTILINE)
    numbers = [int(number) for number, _, _ in listed]
    assert numbers == list(range(1, len(listed) + 1))
    for _, file, name in listed:
        assert re.search(rf"^ *def {name}\(", (ROOT / file).read_text(), re.MULTILINE), name
    cells = [cell for role in ROLES for row in rows_of(role)[1:] for cell in row[1:]]
    used = {int(number) for cell in cells for number in re.findall(r"\d+", cell)}
    assert used == set(numbers)


def test_nobody_waits_by_the_wall_clock() -> None:
    """They read it for what they record and show only; what they wait by cannot be set."""
    folders = ("balance", "costs", "engines", "launcher", "plan", "sidecar", "telemetry")
    files = [file for name in folders for file in (ROOT / "ultraep_serve" / name).rglob("*.py")]
    files += (ROOT / "kernels").rglob("*.py")
    used = {}
    for file in files:
        lines = [line.strip() for line in file.read_text().splitlines()]
        found = [line for line in lines if _WALL_CLOCK.search(line)]
        if found:
            used[file.name] = found
    recorded = {"recorder.py", "run_directory.py"}
    shown = {"follower.py", "routes_balance.py"}  # windows
    assert set(used) == recorded | shown, used
    assert sum(map(len, used.values())) == 7
