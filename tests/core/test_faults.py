"""Nobody waits by a clock that can be set."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WALL_CLOCK = re.compile(r"\btime\.time(?:_ns)?\(|datetime\.|localtime|gmtime")


def test_nobody_waits_by_the_wall_clock() -> None:
    """They read it for what they record and show only; what they wait by cannot be set."""
    package = ROOT / "ultraep_serve"
    apart = {package / "cli", package / "doctor"}  # which wait for nobody
    files = [file for file in package.rglob("*.py") if not apart & {*file.parents}]
    files += (ROOT / "kernels").rglob("*.py")
    used = {}
    for file in files:
        lines = [line.strip() for line in file.read_text().splitlines()]
        found = [line for line in lines if _WALL_CLOCK.search(line)]
        if found:
            used[file.name] = found
    assert set(used) == {"recorder.py"}, used
    assert sum(map(len, used.values())) == 2
