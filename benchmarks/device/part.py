"""One part, in the process that ``__main__`` starts for it: part.py NAME ROWS [--dry-run]."""

import argparse
import importlib
import sys
from pathlib import Path

import _checkout  # noqa: F401
from bench import Bench
from parts import PARTS
from report import Report


def main() -> None:
    """Run the part; exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("rows", type=Path, help="where each result is appended as a line of JSON")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    part = next(part for part in PARTS if part.name == args.name)
    report = Report(args.rows)
    importlib.import_module(part.module).run(Bench(args.dry_run), report, *part.arguments)
    sys.exit(not report.all_passed)


if __name__ == "__main__":
    main()
