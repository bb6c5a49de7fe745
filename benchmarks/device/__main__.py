"""The device path on one GPU: every part of it checked, and how long it takes.

    python benchmarks/device --json benchmarks/results/device.json     # a machine with a GPU
    python benchmarks/device --dry-run                                 # any machine, tiny sizes
    python benchmarks/device --part routing --part layer-qwen3         # some parts only

The checks are the tests' own (``tests/support``, and ``tests/cuda/check_*.py`` in the last two
parts); here they run at real sizes and are timed. A part is a process of its own with a time limit,
so one that hangs or breaks the GPU's context is an error in the report and the next begins afresh;
the JSON is written after each, with the launches that a layer takes (``launches_per_layer``) and
the host's work beside them (``host_microseconds_per_layer``). The most important parts come first;
those for which --seconds leave no time are reported so. Exits with 1 if anything failed; a target
that was missed is no failure. Needs torch, triton, numpy, numba and cuda-bindings, a dry run
also pydantic; where the package is not installed: PYTHONPATH=.:kernels:benchmarks.

Ranks are virtual unless a row says processes: their memory lies in separate buffers of one device,
so rates are the device's own, not those of a link between devices. A dry run takes the same path in
host memory under Triton's interpreter and measures nothing.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import torch
from apart import run_apart, stop_on_terminate
from machine import gpu_state, versions
from parts import PARTS, Part

from tests.support.interpreter import interpreted
from tests.support.launches import KINDS, count_layers, host_microseconds_per_layer
from ultraep_lab.outputs import write_json

SCRIPT = Path(__file__).with_name("parts.py")
DRY_RUN_FACTOR = 5  # times a part's time limit: the interpreter is slow


def main() -> None:
    """Run all parts, or those that were asked for, and write what they found."""
    args = parse_arguments()
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit("no GPU here; use --dry-run to see what would be measured")
    stop_on_terminate()
    report: dict[str, Any] = {
        "command": sys.argv,
        "dry_run": args.dry_run,
        "versions": versions(),
        "gpu": None if args.dry_run else gpu_state(),
        "launches_per_layer": {kind: count_layers(kind)[1].launches for kind in KINDS},
        "host_microseconds_per_layer": host_microseconds_per_layer(),
        "parts": [],
    }
    if args.dry_run:
        print("dry run: tiny sizes under the interpreter, times would stand where - stands")
    end = time.monotonic() + args.seconds * (DRY_RUN_FACTOR if args.dry_run else 1)
    for part in PARTS:
        if not args.part or part.name in args.part:
            entry: dict[str, Any] = {"part": part.name, "rows": [], "error": "was interrupted"}
            report["parts"].append(entry)
            try:
                run_part(part, args.dry_run, end - time.monotonic(), entry)
            finally:
                if args.json:
                    write_json(args.json, report)
    sys.exit(summary(report["parts"]))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes, no times")
    parser.add_argument("--part", action="append", choices=names, help="this one; repeatable")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_part(part: Part, dry_run: bool, seconds_left: float, entry: dict[str, Any]) -> None:
    """Put what one part found into ``entry``, and its error, if it ended in one."""
    limit = min(part.seconds * (DRY_RUN_FACTOR if dry_run else 1), seconds_left)
    print(f"\n{part.name}: at most {max(0, limit):.0f} s", flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.touch()
        arguments = [str(SCRIPT), part.name, str(rows)]
        command = interpreted(arguments) if dry_run else [sys.executable, *arguments]
        try:
            error = run_apart(command, limit) if limit > 0 else "no time was left"
        finally:
            lines = rows.read_text().split("\n")[:-1]  # the last may have been cut off
            entry["rows"] = [json.loads(line) for line in lines]
    entry["seconds"] = time.monotonic() - begin
    entry["gpu"] = None if dry_run else gpu_state()  # as it is when the part has just ended
    del entry["error"]
    if error and all(row["passed"] for row in entry["rows"]):
        entry["error"] = error
        print(f"FAILED {part.name}: {error}", flush=True)


def summary(parts: list[dict[str, Any]]) -> int:
    """Print what failed and which targets were missed; the exit status."""
    failed = [part["part"] for part in parts if "error" in part]
    print()
    for part in parts:
        for row in part["rows"]:
            if not row["passed"]:
                failed.append(f"{part['part']}: {row['what']}")
            elif row.get("met") is False:
                print(f"missed its target: {part['part']}: {row['what']}")
    print(f"failed: {', '.join(failed)}" if failed else "everything that was checked is right")
    return int(bool(failed))


if __name__ == "__main__":
    main()
