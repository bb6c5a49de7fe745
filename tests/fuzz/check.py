"""All targets under libFuzzer, by Atheris: inputs, seconds, memory, and what was found.

    python -m tests.fuzz.check --seconds 1800 --json FILE

An input has 20 s of computing and a process 2 GB; more is a finding, and so is an input after which
nothing goes on. Exit status 1 where there is one, whose input is left in ``build/fuzz``.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
FOUND = ROOT / "build" / "fuzz"
_STANDSTILL_SECONDS = 600  # of an input by the wall clock; the process may have been stopped
_MEMORY_MIB, _START_SECONDS = 2048, 3600
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
# A line of progress: inputs so far, edges covered, and the most memory held so far.
_STATUS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) .*rss: (\d+)Mb", re.MULTILINE)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows of other targets stay")
    parser.add_argument("--keep", action="store_true", help="add what covers more to the corpus")
    arguments = parser.parse_args()
    shares = sum(TARGETS[name].share for name in arguments.targets)
    rows: list[dict[str, Any]] = []
    earlier = []
    if arguments.json and arguments.json.exists():
        earlier = json.loads(arguments.json.read_text())["targets"]
    command = "python -m tests.fuzz.check " + " ".join(sys.argv[1:])

    def measure(name: str) -> None:
        seconds = arguments.seconds * arguments.jobs * TARGETS[name].share / shares
        row = fuzz(name, max(1, round(seconds)), keep=arguments.keep) | {"command": command}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(_document(rows, earlier), indent=2) + "\n")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(measure, arguments.targets))
    document = _document(rows, [])
    print(f"fuzz: {document['inputs']} inputs, {document['findings']} findings")
    return 1 if document["findings"] else 0


def _document(rows: list[dict[str, Any]], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """``rows``, with those ``earlier`` ones whose targets are not among them."""
    known = {row["target"]: row for row in (*earlier, *rows)}
    targets = [known[name] for name in TARGETS if name in known]
    return {
        "inputs": sum(row["inputs"] for row in targets),
        "findings": sum(row["finding"] is not None for row in targets),
        "targets": targets,
    }


def fuzz(name: str, seconds: int, *, keep: bool) -> dict[str, Any]:
    """What became of ``name`` in ``seconds``."""
    FOUND.mkdir(parents=True, exist_ok=True)
    target, committed = TARGETS[name], CORPUS / name
    with tempfile.TemporaryDirectory() as folder:
        grown, seeds = Path(folder, "grown"), Path(folder, "seeds")
        for directory in (grown, seeds, Path(folder, "run")):
            directory.mkdir()
        for number, seed in enumerate(target.seeds(Path(folder, "run"))):
            (seeds / f"seed-{number}").write_bytes(seed)
        options = {
            "max_total_time": seconds, "timeout": _STANDSTILL_SECONDS, "rss_limit_mb": _MEMORY_MIB,
            "max_len": target.max_bytes, "print_final_stats": 1,
            "artifact_prefix": f"{FOUND}/{name}-",
        }  # fmt: skip
        flags = [f"-{option}={value}" for option, value in options.items()]
        directories = [str(path) for path in (grown, seeds, committed) if path.exists()]
        log = FOUND / f"{name}.log"
        began = time.monotonic()
        code = _run(name, [*flags, *directories], log, seconds + _START_SECONDS)
        took = time.monotonic() - began
        if keep and not code:
            _keep(name, [grown, seeds])
    return {"target": name, "seconds": round(took, 1), **_outcome(log, code)}


def _run(name: str, arguments: list[str], log: Path, limit: float) -> int | None:
    """The exit status of a target; None where it did not end within ``limit`` seconds."""
    command = [sys.executable, "-m", "tests.fuzz.run", name, *arguments]
    with log.open("wb") as file:
        try:
            return subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def _outcome(log: Path, code: int | None) -> dict[str, Any]:
    """What libFuzzer's ``log`` says: memory is the most until then, at three moments."""
    text = log.read_text(errors="replace")
    status = [(int(line[1]), int(line[2]), int(line[3])) for line in _STATUS.finditer(text)]
    executed = _EXECUTED.search(text)
    last = status[-1] if status else (0, 0, 0)
    inputs = int(executed[1]) if executed else last[0]
    halfway = [rss for number, _, rss in status if number <= inputs // 2]
    return {
        "inputs": inputs,
        "covered": last[1],
        "last_covered_at": min(
            (number for number, edges, _ in status if edges == last[1]), default=0
        ),
        "memory_mib": {
            "begin": status[0][2] if status else 0,
            "half": halfway[-1] if halfway else 0,
            "end": last[2],
        },
        "finding": None if code == 0 else text[-2000:] or "it did not start",
    }


def _keep(name: str, grown: list[Path]) -> None:
    """The smallest inputs that cover all that was covered, at most 64 of them."""
    committed = CORPUS / name
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path) for path in (*grown, committed) if path.exists()]
        arguments = ["-merge=1", "-use_value_profile=0", folder, *sources]
        if _run(name, arguments, FOUND / f"{name}-merge.log", 600) != 0:
            return
        merged = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_size)[:64]
        contents = {path.name: path.read_bytes() for path in merged}
    committed.mkdir(parents=True, exist_ok=True)
    for path in committed.iterdir():
        path.unlink()
    for file, content in contents.items():
        (committed / file).write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
