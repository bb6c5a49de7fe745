"""Groups that lose a rank at any stage, and groups that start and end many times."""

import os
import signal
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

from tests.support.moe import TinyMoE
from tests.support.ranks import fresh_run_path, outcomes_of_ranks
from tests.support.stress import RandomBatches, StressReport, run_stress
from ultraep_serve.balance.host import balancer
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.config import BalanceConfig
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.recorder import Stopwatch
from ultraep_serve.types import ExpertShape, Policy, Stage, TokenView

__all__ = [
    "Death",
    "Footprint",
    "cycle_group",
    "kill_one",
    "mortal_batches",
    "run_until_death",
]


@dataclass(frozen=True)
class Death:
    """Which rank ends, and when."""

    rank: int
    stage: Stage  # that has just ended; its last one of all batches is COMPUTE
    lap: int  # the how manieth end of this stage
    delay_seconds: float = 0.0  # after that; at 0 at once, else in whatever it does then
    number: signal.Signals = signal.SIGKILL  # how, where it is at once
    stopped_seconds: float = 0.0  # after SIGSTOP


class _Fatal(Stopwatch):
    """Ends its process at one of its laps."""

    death: Death
    laps = 0

    def lap(self, stage: Stage) -> None:
        super().lap(stage)
        if stage is not self.death.stage:
            return
        type(self).laps += 1
        if self.laps != self.death.lap:
            return
        if self.death.delay_seconds:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also in a kernel
            signal.setitimer(signal.ITIMER_REAL, self.death.delay_seconds)
            return
        if self.death.number is signal.SIGSTOP:
            wake = f"sleep {self.death.stopped_seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake])
        os.kill(os.getpid(), self.death.number)


def mortal_batches(num_ranks: int, view: TokenView, seed: int) -> RandomBatches:
    """Relays always, several chunks per expert, rank 0 switches policies at random."""
    config = BalanceConfig(min_batch_tokens=1, timeout_seconds=10.0)
    model = TinyMoE(ExpertShape(num_ranks, 7 * num_ranks, 2), inner=80, hidden=32)
    policies = (Policy.QUOTA, Policy.QUOTA, Policy.QUOTA, Policy.OFF)
    return RandomBatches(
        model,
        view,
        config,
        num_batches=1000,
        relay="always",
        policies=policies,
        mortal=True,
        seed=seed,
    )


def run_until_death(
    rank: int, run_path: Path, batches: RandomBatches, death: Death
) -> StressReport:
    """``run_stress`` in which ``death.rank`` dies."""
    _Fatal.death = death
    mine = patch.object(balancer, "Stopwatch", _Fatal) if rank == death.rank else nullcontext()
    with mine:
        return run_stress(rank, run_path, batches)


def kill_one(batches: RandomBatches, death: Death) -> list[str]:
    """What was wrong after one rank of a group had died; empty where all went well.

    A survivor that hangs, ends otherwise than by PeerTimeoutError or gave a wrong output is wrong,
    and so is a victim that does not die, or a file that is left in the run directory.
    """
    with fresh_run_path() as run_path:
        outcomes = outcomes_of_ranks(
            run_until_death,
            batches.model.shape.num_ranks,
            run_path,
            batches,
            death,
            timeout_seconds=60.0,
        )
        wrong = [f"left behind: {path}" for path in run_path.rglob("*") if path.is_file()]
    for rank, outcome in enumerate(outcomes):
        report = outcome.value
        if rank == death.rank:
            expected = signal.SIGALRM if death.delay_seconds else death.number
            if outcome.signal != expected:
                wrong.append(f"rank {rank} did not die: {outcome}")
        elif outcome.timed_out or outcome.signal or outcome.error:
            wrong.append(f"rank {rank} did not notice: {outcome}")
        elif "has died; restart the engine" not in report.lost:
            wrong.append(f"rank {rank} does not say why it ended: {report.lost!r}")
        elif report.inexact or report.corrupt_slots:
            wrong.append(f"rank {rank}: {report.inexact} outputs differ, {report.corrupt_slots = }")
    return wrong


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    resident_kibibytes: int
    mappings: int
    descriptors: int

    @classmethod
    def of(cls, process: int) -> "Footprint":
        """Of the process with this number, as this process sees it."""
        about = Path(f"/proc/{process}")
        resident = int((about / "status").read_text().split("VmRSS:")[1].split()[0])
        mappings = len((about / "maps").read_text().splitlines())
        return cls(resident, mappings, len(os.listdir(about / "fd")))


def cycle_group(rank: int, num_ranks: int, run_path: Path, cycles: int) -> dict[int, Footprint]:
    """A group that meets, fills slots and ends, so often; footprints by numbers of cycles."""
    seen = {}
    for cycle in range(1, cycles + 1):
        _start_and_stop(rank, num_ranks, run_path / str(cycle))
        if cycle % max(1, cycles // 10) == 0:
            seen[cycle] = Footprint.of(os.getpid())
    return seen


def _start_and_stop(rank: int, num_ranks: int, run_path: Path) -> None:
    run_path.mkdir(exist_ok=True)
    model = TinyMoE(ExpertShape(num_ranks, 2 * num_ranks, 1), inner=80, hidden=32)
    pool = SlotPool(HostMemory(), 1, chunk_bytes=4096)
    layers = [pool.adopt(model.masters(layer, rank)) for layer in range(model.num_layers)]
    fabric = HostFabric(
        run_path,
        Location.on_one_host(rank, num_ranks),
        4,
        pool,
        max(layer.chunks.shape[0] for layer in layers),
        60.0,
    )
    slot_expert = np.array(
        [[(other + 1) % num_ranks * 2] for other in range(num_ranks)], dtype=np.int32
    )
    for layer in layers:
        fabric.exchange(np.zeros(4, np.int64))
        fabric.stream(layer, slot_expert, np.full_like(slot_expert, -1, dtype=np.int64), 2)
        fabric.wait_slots(layer, slot_expert)
    fabric.exchange(np.zeros(4, np.int64))  # all have read theirs
    if rank == 0:
        run_path.rmdir()
    fabric.close()
    del layers
    pool.close()
