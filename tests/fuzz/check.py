"""All targets under libFuzzer, by Atheris: inputs, seconds, and what was found.

    python -m tests.fuzz.check --seconds 1800 --json FILE

An input has 10 s and a process 2 GB; more is a finding. Exit status 1 where there is one, whose
input is left in ``build/fuzz``.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
FOUND = ROOT / "build" / "fuzz"
_INPUT_SECONDS, _MEMORY_MIB, _START_SECONDS = 10, 2048, 300
_EXECUTED = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_PEAK = re.compile(r"stat::peak_rss_mb:\s*(\d+)")
_COVERAGE = re.compile(r"cov: (\d+)")


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of all targets together")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--keep", action="store_true", help="add what covers more to the corpus")
    arguments = parser.parse_args()
    shares = sum(TARGETS[name].share for name in arguments.targets)
    rows = []
    for name in arguments.targets:
        seconds = arguments.seconds * TARGETS[name].share / shares
        row = fuzz(name, max(1, round(seconds)), keep=arguments.keep)
        rows.append(row)
        print(json.dumps(row), flush=True)
    document = {
        "command": "python -m tests.fuzz.check " + " ".join(sys.argv[1:]),
        "inputs": sum(row["inputs"] for row in rows),
        "findings": sum(row["finding"] is not None for row in rows),
        "targets": rows,
    }
    print(f"fuzz: {document['inputs']} inputs, {document['findings']} findings")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if document["findings"] else 0


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
            "max_total_time": seconds, "timeout": _INPUT_SECONDS, "rss_limit_mb": _MEMORY_MIB,
            "max_len": target.max_bytes, "print_final_stats": 1,
            "artifact_prefix": f"{FOUND}/{name}-",
        }  # fmt: skip
        flags = [f"-{option}={value}" for option, value in options.items()]
        directories = [str(path) for path in (grown, seeds, committed) if path.exists()]
        log = FOUND / f"{name}.log"
        began = time.monotonic()
        with log.open("wb") as file:
            code = subprocess.run(
                [sys.executable, "-m", "tests.fuzz.run", name, *flags, *directories],
                cwd=ROOT, stdout=file, stderr=file, timeout=seconds + _START_SECONDS, check=False,
            ).returncode  # fmt: skip
        took = time.monotonic() - began
        text = log.read_text(errors="replace")
        if keep and not code:
            _keep(name, grown, committed)
    executed, peak = _EXECUTED.search(text), _PEAK.search(text)
    covered = _COVERAGE.findall(text)
    return {
        "target": name,
        "inputs": int(executed[1]) if executed else 0,
        "seconds": round(took, 1),
        "covered": int(covered[-1]) if covered else 0,
        "peak_mib": int(peak[1]) if peak else 0,
        "finding": None if code == 0 else text[-2000:],
    }


def _keep(name: str, grown: Path, committed: Path) -> None:
    """The smallest inputs that cover all that was covered, at most 64 of them."""
    committed.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", name, "-merge=1", str(committed), str(grown)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600, check=False)
    for extra in sorted(committed.iterdir(), key=lambda path: path.stat().st_size)[64:]:
        extra.unlink()


if __name__ == "__main__":
    sys.exit(main())
