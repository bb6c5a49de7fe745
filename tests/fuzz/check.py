"""All targets under libFuzzer, by Atheris: inputs, seconds, memory, and what was found.

    python -m tests.fuzz.check --seconds 1800 --json FILE

An input has 60 s and a process 2 GB; more is a finding, and so is an input after which nothing goes
on. Exit status 1 where there is one, whose input is left in ``build/fuzz``.
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
from ultraep_lab.outputs import write_json

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).with_name("corpus")
FOUND = ROOT / "build" / "fuzz"
_START_SECONDS = 3600
# A line of progress: inputs so far, edges covered, and the most memory held so far.
_STATUS = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) .*rss: (\d+)Mb", re.MULTILINE)


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows of other targets stay")
    arguments = parser.parse_args()
    seconds = arguments.seconds * arguments.jobs
    seconds /= sum(TARGETS[name].share for name in arguments.targets)
    earlier = []
    if arguments.json and arguments.json.exists():
        earlier = json.loads(arguments.json.read_text())["targets"]
    known = {row["target"]: row for row in earlier}

    def measure(name: str) -> bool:
        row = fuzz(name, max(1, round(seconds * TARGETS[name].share)))
        known[name] = row | {"command": "python -m tests.fuzz.check " + " ".join(sys.argv[1:])}
        print(json.dumps(row), flush=True)
        return row["finding"] is None

    with ThreadPoolExecutor(arguments.jobs) as pool:
        fine = list(pool.map(measure, arguments.targets))
    rows = [known[name] for name in TARGETS if name in known]
    if arguments.json:
        figures = {"inputs": sum(row["inputs"] for row in rows)}
        figures["findings"] = sum(row["finding"] is not None for row in rows)
        write_json(arguments.json, {**figures, "targets": rows})
    print(f"fuzz: {len(fine)} targets, {fine.count(False)} findings")
    return 0 if all(fine) else 1


def fuzz(name: str, seconds: int) -> dict[str, Any]:
    """What became of ``name`` in ``seconds``; memory is the most until then, at three moments."""
    FOUND.mkdir(parents=True, exist_ok=True)
    log = FOUND / f"{name}.log"
    with tempfile.TemporaryDirectory() as folder:
        grown, seeds, run = (Path(folder, part) for part in ("grown", "seeds", "run"))
        for directory in (grown, seeds, run):
            directory.mkdir()
        for number, seed in enumerate(TARGETS[name].seeds(run)):
            (seeds / f"seed-{number}").write_bytes(seed)
        flags = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=2048"]
        flags += [f"-max_len={TARGETS[name].max_bytes}", f"-artifact_prefix={FOUND}/{name}-"]
        inputs = [str(path) for path in (grown, seeds, CORPUS / name) if path.exists()]
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz.run", name, *flags, *inputs]
        code = None  # it did not end
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
            try:
                code = process.wait(seconds + _START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        took = round(time.monotonic() - began, 1)
    text = log.read_text(errors="replace")
    found = [tuple(map(int, line.groups())) for line in _STATUS.finditer(text)] or [(0, 0, 0)]
    number, covered, memory = found[-1]
    halfway = [rss for number_then, _, rss in found if number_then <= number // 2]
    return {
        "target": name,
        "seconds": took,
        "inputs": number,
        "covered": covered,
        "memory_mib": {"begin": found[0][2], "half": (halfway or [0])[-1], "end": memory},
        "finding": None if code == 0 else text[-2000:] or "it did not start",
    }


if __name__ == "__main__":
    sys.exit(main())
