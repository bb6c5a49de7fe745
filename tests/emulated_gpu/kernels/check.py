"""Execute the compiled kernels over many seeds, and see that every seeded mistake is found.

    python -m tests.emulated_gpu.kernels.check [--quick] [--first-seed N] [--seeds N]
        [--scenario NAME] [--no-mistakes] [--json FILE] [--verbose]

Ends in one line. Exits with 1 where a run without mistakes is not right, or a mistake is not found.
The file is replaced after every seed, so a run that is interrupted leaves what it has found.
"""

import argparse
import gc
import hashlib
import logging
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.environment import ensure_installed, has_program

__all__ = ["main"]

_SEEDS, _QUICK_SEEDS = 200, 2
_TRIES, _QUICK_TRIES = 6, 2  # seeds for a mistake


@dataclass
class _Played:
    """What came of a scenario without mistakes."""

    seeds: int = 0
    launches: int = 0
    steps: int = 0
    seconds: float = 0.0  # of this process's CPU time
    failures: list[str] = field(default_factory=list)


@dataclass
class _Totals:
    launches: int = 0
    races: set[str] = field(default_factory=set)
    played: dict[str, _Played] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)  # what was reported, "" nothing

    @property
    def found(self) -> int:
        return sum(map(bool, self.mistakes.values()))

    @property
    def seeds(self) -> int:
        """Of the scenario that has been played least."""
        return min((each.seeds for each in self.played.values()), default=0)

    @property
    def is_right(self) -> bool:
        failed = any(each.failures for each in self.played.values())
        return not (self.races or failed or self.found < len(self.mistakes))

    def write(self, path: Path | None) -> None:
        """Replace the file, if there is to be one."""
        if path is None:
            return
        from ultraep_lab.outputs import write_json
        from ultraep_lab.this_machine import describe

        report = {
            "command": "python -m tests.emulated_gpu.kernels.check " + " ".join(sys.argv[1:]),
            "machine": describe(),
            "kernels": _kernels(),
            "launches": self.launches,
            "races": sorted(self.races),
            "scenarios": {name: asdict(each) for name, each in self.played.items()},
            "mistakes": self.mistakes,
        }
        write_json(path, report)


def _kernels() -> str:
    """The kernels' sources in one word."""
    import ultraep_kernels

    folder = Path(ultraep_kernels.__file__).parent
    paths = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def main() -> int:
    """Check everything, print a line at the end; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few seeds, small groups: two minutes")
    parser.add_argument("--seeds", type=int, help="of every scenario; 0: none")
    parser.add_argument("--first-seed", type=int, default=0, help="and those that follow")
    parser.add_argument("--scenario", action="append", help="only these")
    parser.add_argument("--no-mistakes", action="store_true", help="make none on purpose")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    arguments = parser.parse_args()
    ensure_installed({"gcc": has_program("gcc")})
    warnings.simplefilter("ignore")
    logging.disable()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads for so little wait for each other
    totals = _Totals()
    _check_scenarios(arguments, totals)
    if not arguments.no_mistakes:
        _check_mistakes(arguments, totals)
    totals.write(arguments.json)
    print(f"ptx: {totals.launches} launches, {totals.seeds} seeds, {len(totals.races)} races, "
          f"{totals.found} of {len(totals.mistakes)} mistakes found")  # fmt: skip
    return int(not totals.is_right)


def _check_scenarios(arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.emulated_gpu.kernels.scenarios import SCENARIOS

    names = arguments.scenario or [
        name for name, each in SCENARIOS.items() if each.is_quick or not arguments.quick
    ]
    number = _QUICK_SEEDS if arguments.quick else _SEEDS
    if arguments.seeds is not None:
        number = arguments.seeds
    first = arguments.first_seed
    for seed in range(first, first + number):
        for name in names:
            _play_one(name, seed, arguments, totals)
            totals.write(arguments.json)
        if seed == first:
            gc.freeze()  # what was compiled and parsed stays


def _play_one(name: str, seed: int, arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.emulated_gpu.kernels.scenarios import SCENARIOS, play

    scenario, played = SCENARIOS[name], totals.played.setdefault(name, _Played())
    started = time.process_time()
    outcome = play(scenario, scenario.options_of(seed))
    seconds = time.process_time() - started
    played.seeds += 1
    played.seconds += seconds
    played.launches += outcome.launches
    played.steps += outcome.steps
    totals.launches += outcome.launches
    new = {str(each) for each in outcome.findings} - totals.races
    totals.races |= new
    if bad := [*outcome.wrong, *filter(None, [outcome.failure])]:
        played.failures += [f"seed {seed}: {line}" for line in bad]
    if arguments.verbose or new or bad:
        print(f"{name}, seed {seed}: {outcome.launches} launches, {outcome.steps:,} steps, "
              f"{seconds:.1f} s", flush=True)  # fmt: skip
        for line in (*sorted(new), *bad):
            print(f"    {line}", flush=True)


def _check_mistakes(arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.emulated_gpu.kernels.mistakes import MISTAKES

    for mistake in MISTAKES:
        if arguments.scenario and mistake.scenario not in arguments.scenario:
            continue
        started = time.perf_counter()
        found = _find(mistake, _QUICK_TRIES if arguments.quick else _TRIES, totals)
        totals.mistakes[mistake.name] = found
        totals.write(arguments.json)
        if arguments.verbose or not found:
            seconds = time.perf_counter() - started
            print(f"{mistake.name}: {found or 'NOT FOUND'} ({seconds:.1f} s)", flush=True)


def _find(mistake, tries: int, totals: _Totals) -> str:  # type: ignore[no-untyped-def]
    """The first thing that is reported beyond what a run without mistakes reports."""
    from tests.emulated_gpu.kernels.mistakes import play_with

    for seed in range(1, tries + 1):
        outcome = play_with(mistake, seed)
        totals.launches += outcome.launches
        said = [str(each) for each in outcome.findings if str(each) not in totals.races]
        said += [*outcome.wrong, outcome.failure]
        if first := next(filter(None, said), ""):
            return first
    return ""


if __name__ == "__main__":
    sys.exit(main())
