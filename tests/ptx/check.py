"""Execute the compiled kernels over many seeds, and see that every seeded mistake is found.

    python -m tests.ptx.check [--quick] [--seeds N] [--scenario NAME] [--json FILE] [--verbose]

Ends in one line. Exits with 1 where a run without mistakes is not right, or a mistake is not found.
The file is replaced after every seed, so a run that is interrupted leaves what it has found.
"""

import argparse
import gc
import json
import logging
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deploy.environment import ensure_installed, has_program

__all__ = ["main", "options_of"]

_RESIDENT = (1, 2, 3, 5, 8, 1 << 20)  # programs of a rank at a time
_QUANTA = (1, 3, 16, 100)
_SEEDS, _QUICK_SEEDS = 200, 2
_TRIES, _QUICK_TRIES = 6, 2  # seeds for a mistake
_QUICK_SCENARIOS = ("two ranks", "relays", "a silent rank", "dispatch", "calibration")


@dataclass
class _Played:
    """What came of a scenario without mistakes."""

    seeds: int = 0
    launches: int = 0
    steps: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass
class _Totals:
    launches: int = 0
    seeds: int = 0
    races: set[str] = field(default_factory=set)
    failures: int = 0
    played: dict[str, _Played] = field(default_factory=dict)
    mistakes: dict[str, str] = field(default_factory=dict)  # what was reported, "" nothing

    @property
    def found(self) -> int:
        return sum(map(bool, self.mistakes.values()))

    def write(self, path: Path | None) -> None:
        """Replace the file, if there is to be one."""
        if path is None:
            return
        played = {name: asdict(each) for name, each in self.played.items()}
        for each in played.values():
            each["seconds"] = round(each["seconds"], 1)
        report = {
            "command": "python -m tests.ptx.check " + " ".join(sys.argv[1:]),
            "launches": self.launches,
            "races": sorted(self.races),
            "scenarios": played,
            "mistakes": self.mistakes,
        }
        half = path.with_suffix(".half")
        half.write_text(json.dumps(report, indent=1) + "\n")
        half.replace(path)


def main() -> int:
    """Check everything, print a line at the end; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few seeds, small groups: two minutes")
    parser.add_argument("--seeds", type=int, help="of every scenario")
    parser.add_argument("--scenario", action="append", help="only these")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--verbose", action="store_true", help="a line for every run")
    arguments = parser.parse_args()
    ensure_installed({"gcc": has_program("gcc")})
    warnings.simplefilter("ignore")
    logging.disable()
    totals = _Totals()
    _check_scenarios(arguments, totals)
    _check_mistakes(arguments, totals)
    print(f"ptx: {totals.launches} launches, {totals.seeds} seeds, {len(totals.races)} races, "
          f"{totals.found} of {len(totals.mistakes)} mistakes found")  # fmt: skip
    return int(bool(totals.races or totals.failures or totals.found < len(totals.mistakes)))


def options_of(seed: int, least_resident: int = 1, resident: int = 0):  # type: ignore[no-untyped-def]
    """How the run of a seed is made: few or many programs at a time, short turns or long ones."""
    from tests.ptx.machine import Options

    fits = resident or max(least_resident, _RESIDENT[seed % len(_RESIDENT)])
    quantum = _QUANTA[seed // len(_RESIDENT) % len(_QUANTA)]
    return Options(seed=seed, resident=fits, quantum=quantum, order=(0, 2, 1, 0)[seed % 4])


def _check_scenarios(arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.ptx.scenarios import SCENARIOS

    names = arguments.scenario or (_QUICK_SCENARIOS if arguments.quick else SCENARIOS)
    totals.seeds = arguments.seeds or (_QUICK_SEEDS if arguments.quick else _SEEDS)
    for seed in range(totals.seeds):
        for name in names:
            _play_one(name, seed, arguments, totals)
            totals.write(arguments.json)
        if seed == 0:
            gc.freeze()  # what was compiled and parsed stays


def _play_one(name: str, seed: int, arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.ptx.scenarios import SCENARIOS, play

    scenario, played = SCENARIOS[name], totals.played.setdefault(name, _Played())
    started = time.perf_counter()
    outcome = play(scenario, options_of(seed, scenario.least_resident, scenario.resident))
    seconds = time.perf_counter() - started
    played.seeds, played.seconds = seed + 1, played.seconds + seconds
    played.launches += outcome.launches
    played.steps += outcome.steps
    totals.launches += outcome.launches
    new = {str(each) for each in outcome.findings} - totals.races
    totals.races |= new
    if bad := [*outcome.wrong, *filter(None, [outcome.failure])]:
        totals.failures += 1
        played.failures += [f"seed {seed}: {line}" for line in bad]
    if arguments.verbose or new or bad:
        print(f"{name}, seed {seed}: {outcome.launches} launches, {outcome.steps:,} steps, "
              f"{seconds:.1f} s", flush=True)  # fmt: skip
        for line in (*sorted(new), *bad):
            print(f"    {line}", flush=True)


def _check_mistakes(arguments: argparse.Namespace, totals: _Totals) -> None:
    from tests.ptx.mistakes import MISTAKES

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
    from tests.ptx.mistakes import change_of
    from tests.ptx.scenarios import SCENARIOS, play

    scenario, change = SCENARIOS[mistake.scenario], change_of(mistake)
    for seed in range(1, tries + 1):
        options = options_of(seed, scenario.least_resident, mistake.resident or scenario.resident)
        outcome = play(scenario, options, change, mistake.forgets)
        totals.launches += outcome.launches
        said = [str(each) for each in outcome.findings if str(each) not in totals.races]
        said += [*outcome.wrong, outcome.failure]
        if first := next(filter(None, said), ""):
            return first
    return ""


if __name__ == "__main__":
    sys.exit(main())
