"""Every fault of the table, in every stage, and what was seen.

python -m tests.faults.check --json benchmarks/results/faults.json
"""

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.injector import STAGES, Fault, inject
from tests.faults.table import EXPECTED, faults
from ultraep_lab.outputs import write_json
from ultraep_lab.this_machine import describe


def seen(fault: Fault) -> str:
    folder = Path(tempfile.mkdtemp(prefix="uep-faults-", dir="/dev/shm"))
    try:
        return inject(fault, folder)
    except Exception as error:  # that the run itself failed is what is seen
        log = (folder / "log").read_text(errors="replace")[-500:]
        return f"fails: {error!r} {log}"
    finally:
        shutil.rmtree(folder)


def is_expected(fault: Fault, word: str) -> bool:
    """Whether the table says so."""
    return word == EXPECTED[fault[:2]][STAGES.index(fault.stage)]


def main() -> int:
    """Exit status: 1 where something else was seen than is expected."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", default="", help="faults of which this is a part")
    arguments = parser.parse_args()
    began, rows, wrong = time.monotonic(), [], 0
    chosen = [fault for fault in faults() if arguments.only in " ".join(fault)]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for fault, word in zip(chosen, pool.map(seen, chosen), strict=True):
            rows.append({**fault._asdict(), "seen": word})
            wrong += not is_expected(fault, word)
            mark = "" if is_expected(fault, word) else "   NOT EXPECTED"
            print(f"{', '.join(fault)}: {word}{mark}", flush=True)
    if arguments.json:
        command = f"python -m tests.faults.check --at-once {arguments.at_once}"
        took = round(time.monotonic() - began, 1)
        document = {"command": command, "seconds": took, "wrong": wrong, "faults": rows}
        write_json(arguments.json, {**document, "machine": describe()})
    print(f"faults: {len(rows)} injected, {wrong} seen otherwise than expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
