"""What all benchmarks share: ``tests.support`` on the path, --json, and how results are written."""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultraep_lab.outputs import write_json
from ultraep_lab.this_machine import describe

sys.path.append(str(Path(__file__).resolve().parent.parent))


def parser(description: str, default: str | None = None) -> argparse.ArgumentParser:
    """A command line with --json, by default the file ``default`` of benchmarks/results."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = Path(__file__).resolve().parent / "results" / default if default else None
    shown = f" (default: benchmarks/results/{default})" if default else ""
    made.add_argument("--json", type=Path, default=path, help=f"write the results here{shown}")
    return made


def numbers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(map(int, text.split(",")))


def command() -> str:
    """The command line, to publish beside figures."""
    return shlex.join(["python", *sys.argv])


def commit() -> str | None:
    """The commit that runs; None outside of a checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None


def write(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write ``results`` with command, commit and machine; nothing where there is no ``path``."""
    if path is not None:
        how = {"command": command(), "commit": commit(), "machine": describe()}
        write_json(path, {**results, **how})
