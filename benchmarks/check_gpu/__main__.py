"""All that one machine with a GPU can tell of this project, in one file, within half an hour.

    python benchmarks/check_gpu                      # writes check-gpu.json
    python benchmarks/check_gpu --dry-run            # any machine: what a CPU can play of it
    python benchmarks/check_gpu --seconds 570 --resume     # again and again, where time is cut up
    python benchmarks/check_gpu --kit build/gpu_kit        # engines from the kit (kit.py)

A part is a process of its own with a time limit. The file is replaced after each. A part that
fails, hangs, or cannot run is an entry with the reason and its last lines of output, and the next
part begins. ``--resume`` makes the parts that have no result yet. The file names the GPU, versions
and the commit, and no host, user or path. Beside it a sheet (``check-gpu.md``) has what reviewers
of vLLM and SGLang ask of a balancer, and names what of that is missing. Exits with 1 if a part
failed; one that cannot run here is no failure.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[1:1] = [str(FOLDER.parent / "device"), str(ROOT), str(ROOT / "kernels")]
sys.path.append(str(FOLDER.parent))

from apart import run_apart, stop_on_terminate  # noqa: E402
from carried import environment, missing_piece, unpack  # noqa: E402
from machine import gpu_state, versions  # noqa: E402
from privacy import without_names  # noqa: E402
from processes import CANNOT_RUN, PARTS, Part  # noqa: E402
from report import EMULATED  # noqa: E402
from sheet import sheet  # noqa: E402

from ultraep_lab.outputs import write_json  # noqa: E402

SLOW_FACTOR = 8  # times a part's limit, where a CPU plays the GPU
LAST_LINES = 30
COMMAND = "python " + ("-m tests.emulated_gpu" if EMULATED else "benchmarks/check_gpu")
WITH_RESULT = ("passed", "failed", "cannot run")


def main() -> None:
    """Run what was asked for, keep the file, and print the table."""
    options = parse_options()
    if options.kit:
        use_kit(options.kit)
    stop_on_terminate()
    document = start(options)
    end = time.monotonic() + options.seconds * slowness(options.dry_run)
    for part in PARTS:
        if options.parts and part.name not in options.parts:
            continue
        if document["parts"].get(part.name, {}).get("result") in WITH_RESULT:
            continue
        again = f"{COMMAND} {'--dry-run ' if options.dry_run else ''}--parts {part.name}"
        entry: dict[str, Any] = {"command": again, "result": "interrupted", "seconds": 0.0}
        document["parts"][part.name] = entry
        write(options.json, document)
        run_part(part, options.dry_run, end - time.monotonic(), entry)
        write(options.json, document)
    print_table(document["parts"])
    options.json.with_suffix(".md").write_text(sheet(document))
    print(f"\nresult: {options.json}, sheet: {options.json.with_suffix('.md')}")
    sys.exit(any(entry["result"] == "failed" for entry in document["parts"].values()))


def parse_options() -> argparse.Namespace:
    """Command line."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="check_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="no GPU: tiny sizes, no times")
    parser.add_argument("--parts", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=1800, help="for all parts together")
    parser.add_argument("--resume", action="store_true", help="only parts without a result")
    parser.add_argument("--kit", type=Path, metavar="FOLDER", help="where its pieces are brought")
    parser.add_argument("--json", type=Path, default=Path("check-gpu.json"), help="the result")
    return parser.parse_args()


def use_kit(kit: Path) -> None:
    """Go on with what the kit has, in this process's place; end where a piece of it is missing."""
    if piece := missing_piece(kit):
        sys.exit(f"bring a piece of the kit to {kit}, and start again: {piece}")
    unpack(kit)
    needed = environment(kit)
    if os.environ.get("VLLM_NCCL_SO_PATH") != needed["VLLM_NCCL_SO_PATH"]:
        os.execve(sys.executable, sys.orig_argv, os.environ | needed)


def start(options: argparse.Namespace) -> dict[str, Any]:
    """The document, with what an earlier run on the same machine and commit has found."""
    document: dict[str, Any] = {"dry_run": options.dry_run, **machine(options.dry_run)}
    parts: dict[str, Any] = {}
    if options.resume and options.json.exists():
        before = json.loads(options.json.read_text())
        if {name: before.get(name) for name in ("dry_run", "commit")} != {
            name: document[name] for name in ("dry_run", "commit")
        }:
            sys.exit(
                f"{options.json} is of another commit or kind of run; remove it or name another"
            )
        parts = before["parts"]
    return {**document, "parts": parts}


def machine(dry_run: bool) -> dict[str, Any]:
    """GPU, versions and commit."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not dry_run:
        sys.exit("no GPU here; use --dry-run to see what would be done")
    return {
        "commit": git("rev-parse", "HEAD") or "not a git checkout",
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions(),
        "gpu": None if dry_run else gpu_state(),
        "emulated_gpu": EMULATED,
        "num_gpus": torch.cuda.device_count() if has_gpu else 0,
    }


def git(*arguments: str) -> str:
    """What git says of the checkout; nothing where it is none, or where there is no git."""
    try:
        said = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return said.stdout.strip()


def slowness(dry_run: bool) -> int:
    """Times as long as on a GPU."""
    return SLOW_FACTOR if dry_run or EMULATED else 1


def run_part(part: Part, dry_run: bool, seconds_left: float, entry: dict[str, Any]) -> None:
    """Put into ``entry`` how one part ended and what it found."""
    wanted = part.seconds * slowness(dry_run)
    if seconds_left < wanted / 2:
        entry.update(result="no time", reason=f"{max(0, seconds_left):.0f} s were left")
        return
    limit, began = min(wanted, seconds_left), time.monotonic()
    print(f"{part.name}: at most {limit:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found, log = Path(folder, part.file), Path(folder, "log")
        command, reason = part.command(found, dry_run, limit)
        error = ""
        if command:
            with log.open("wb") as output:
                error = run_apart(command, limit, output)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        entry["found"] = read_found(found)
    entry["seconds"] = round(time.monotonic() - began, 1)
    if error == f"ended with {CANNOT_RUN}":
        reason = lines[-1] if lines else "it gave no reason"
    if reason:
        entry.update(result="cannot run", reason=reason)
    else:
        entry.update(result="failed" if error else "passed")
    if error and not reason:
        entry.update(reason=error, output=lines[-LAST_LINES:])
    print(f"{part.name}: {entry['result']} {entry.get('reason', '')}", flush=True)


def read_found(path: Path) -> Any:
    """What a part wrote: a report, or rows of which the last may have been cut off."""
    if not path.exists():
        return None
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace the result."""
    write_json(path, without_names(document))


def print_table(parts: dict[str, Any]) -> None:
    """Part, result, seconds, and why it is not more."""
    print(f"\n{'part':24} {'result':12} {'seconds':>8}")
    for name, entry in parts.items():
        reason = without_names(entry.get("reason", ""))
        print(f"{name:24} {entry['result']:12} {entry['seconds']:8.1f}  {reason}")


if __name__ == "__main__":
    main()
