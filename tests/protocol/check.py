"""Check the model of docs/dev/protocol.md with Spin: of exchange and streaming between ranks.

    python -m tests.protocol.check [--quick] [--json FILE]

Every right form must hold in all its states, and every seeded mistake must be found. Standard
library only. Debian's packages spin and gcc are installed where that is possible. Exits with 1
where the model says otherwise.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.environment import ensure_installed, has_program

FABRIC = Path(__file__).with_name("fabric.pml")
MAX_MEBIBYTES = 4000
MAX_DEPTH = 100_000  # steps of one run; Spin says where they did not suffice


@dataclass(frozen=True)
class Form:
    """One way to compile the model."""

    num_ranks: int
    device: bool = False  # the kernels' way to give up: they go on
    fault: str = "none"  # or one rank "dies", or one "stops" for ever
    impatient: bool = False  # a wait may find its time over at any moment
    num_chunks: int = 1
    num_plans: int = 6
    staying: bool = False  # copies stay in slots, and experts change once
    cycles: bool = False  # look for steps that repeat for ever, not for broken claims
    mistake: str = ""

    @property
    def defines(self) -> list[str]:
        """For the preprocessor."""
        values = {
            "NUM_RANKS": self.num_ranks,
            "FAULT": ("none", "dies", "stops").index(self.fault),
            "NUM_CHUNKS": self.num_chunks,
            "NUM_PLANS": self.num_plans,
        }
        flags = {"DEVICE": self.device, "IMPATIENT": self.impatient, "STAYING": self.staying}
        flags[f"MISTAKE_{self.mistake}"] = bool(self.mistake)
        names = [name for name, is_set in flags.items() if is_set]
        return [f"-D{name}={value}" for name, value in values.items()] + [f"-D{n}" for n in names]

    @property
    def words(self) -> list[str]:
        """What tells it from others."""
        words = [f"{self.num_ranks} ranks", "device" if self.device else "host"]
        words += [f"one {self.fault}"] * (self.fault != "none")
        words += ["impatient"] * self.impatient + ["copies stay"] * self.staying
        words += ["cycles"] * self.cycles
        return words + [self.mistake] * bool(self.mistake)


RIGHT = (
    Form(2, num_chunks=2),
    Form(2, fault="dies"),
    Form(2, fault="stops"),
    Form(2, impatient=True),
    Form(2, device=True),
    Form(2, device=True, fault="dies"),
    Form(2, device=True, impatient=True),
    Form(2, fault="dies", num_plans=3, cycles=True),
    Form(2, device=True, impatient=True, num_plans=3, cycles=True),
    Form(3),
    Form(3, fault="dies", num_plans=3),
    Form(3, impatient=True, num_plans=3),
    Form(3, device=True, num_plans=2),
    Form(3, device=True, impatient=True, num_plans=2),
    Form(2, staying=True),
    Form(2, staying=True, fault="dies", num_plans=4),
    Form(2, staying=True, device=True, impatient=True, num_plans=3),
    Form(3, staying=True, num_plans=3),
)
QUICK = (
    Form(2, num_chunks=2),
    Form(2, fault="dies", num_plans=3),
    Form(2, impatient=True, num_plans=3),
    Form(2, device=True, impatient=True, num_plans=3),
    Form(2, staying=True, num_plans=4),
)
MISTAKES = (
    Form(2, mistake="FENCE_LEFT_OUT"),
    Form(2, mistake="POSTED_BEFORE_COMPUTED"),
    Form(2, mistake="FLAG_BEFORE_ROW"),
    Form(2, mistake="FLAG_BEFORE_DATA"),
    Form(2, mistake="EPOCH_REUSED"),
    Form(2, mistake="FLAGS_ARE_RESET"),
    Form(2, mistake="ONE_ROW"),
    Form(2, mistake="PLAN_FROM_OWN_ROW"),
    Form(2, mistake="NOBODY_WAITS_FOR_SLOTS"),
    Form(3, mistake="RELAY_DOES_NOT_WAIT"),
    Form(3, mistake="RELAYS_IN_A_CIRCLE"),
    Form(2, mistake="NOBODY_LOOKS_WHO_DIED", fault="dies"),
    Form(2, mistake="NO_LAST_LOOK"),
    Form(2, mistake="POST_AFTER_GIVING_UP", device=True, impatient=True),
    Form(2, mistake="PLAN_AFTER_GIVING_UP", device=True, impatient=True),
    Form(3, mistake="FORWARD_AFTER_GIVING_UP", device=True, impatient=True),
    Form(2, mistake="FORGET_IS_LOST", staying=True),
    Form(2, mistake="REPLACED_COPY_IS_READ", staying=True),
)


def check(form: Form) -> dict[str, Any]:
    """Make and run the verifier: ``form``, the violated claim (or nothing), and Spin's figures.

    Raises RuntimeError where it could not look at every state.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run(["spin", "-a", *form.defines, str(FABRIC)], folder)
        kind = ("-DNP", "-l") if form.cycles else ("-DSAFETY", "-w24")
        options = [kind[0], "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={MAX_MEBIBYTES}"]
        _run(["gcc", "-O1", "-w", *options, "-o", "pan", "pan.c"], folder)
        started = time.perf_counter()
        said = _run(["./pan", f"-m{MAX_DEPTH}", kind[1]], folder)
        seconds = time.perf_counter() - started
    violated = re.search(r"pan:1: (.+) \(at depth", said)
    if not violated and ("errors: 0" not in said or "truncated" in said or "too small" in said):
        raise RuntimeError(f"{form} was not looked at to its end:\n{said}")
    return {
        **asdict(form),
        "found": _in_words(violated[1]) if violated else "",
        "num_states": int(_figure(r"(\S+) states, stored", said)),
        "num_transitions": int(_figure(r"(\S+) transitions", said)),
        "depth": int(_figure(r"depth reached (\d+)", said)),
        "mebibytes": round(_figure(r"(\S+)\s+total actual memory", said)),
        "seconds": round(seconds, 1),
    }


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode or "rror:" in done.stdout.split("pan:")[0]:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _figure(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return float(found[1])


def _in_words(claim: str) -> str:
    """The claim that Spin names by its expression."""
    for part, words in (
        ("invalid end state", "deadlock"),
        ("faulty", "a rank gave up although none had died or stopped"),
        ("computing", "a slot was overwritten while it was read"),
        ("rows", "a row was read that had not arrived, or no longer lay there"),
        ("parents", "a chunk was forwarded that had not arrived"),
        ("pools", "a slot was read that had not arrived"),
    ):
        if part in claim:
            return words
    return claim


def main() -> int:
    """Check all forms, print a table; 1 where one is not as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="of the right forms those of 2 ranks, a minute"
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    ensure_installed({"spin": has_program("spin"), "gcc": has_program("gcc")})
    results, wrong = [], 0
    for form in (*(QUICK if arguments.quick else RIGHT), *MISTAKES):
        results.append(check(form))
        found, states, mebibytes, seconds = (
            results[-1][name] for name in ("found", "num_states", "mebibytes", "seconds")
        )
        is_wrong = bool(found) != bool(form.mistake)  # a right form holds, a mistake is found
        wrong += is_wrong
        print(f"{'WRONG' if is_wrong else 'as expected'}: {', '.join(form.words)}: "
              f"{found or 'holds'} ({states:,} states, {mebibytes} MiB, {seconds} s)",
              flush=True)  # fmt: skip
    if arguments.json:
        document = {"machine": os.uname().machine, "spin": _run(["spin", "-V"], ".").strip()}
        document |= {"command": "make check-protocol", "results": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
