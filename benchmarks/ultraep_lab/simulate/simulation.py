"""Many expert-parallel groups -> what the planner that serves makes of all layers of their batches.

Groups are independent: each has traffic, ranks and links of its own, drawn by seed. Every variant
(slots, domains, relays) plans the same loads on the same ranks and links.
"""

import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from ultraep_kernels.host.speeds import whole_speeds

from ultraep_lab.simulate.layer import FIGURES, GroupMachine, Variant, judge
from ultraep_lab.simulate.traffic import SimulatedTraffic
from ultraep_lab.trace import over_source_ranks
from ultraep_serve.errors import ConfigError, UltraEPError
from ultraep_serve.plan.quota import warm_up
from ultraep_serve.system.settings import Settings

__all__ = [
    "MOST_BATCHES",
    "Figures",
    "Fleet",
    "Simulation",
    "draw_machine",
    "num_groups",
    "simulate",
]

MOST_BATCHES = 100_000
Counts = NDArray[np.int64]
Figures = NDArray[np.float64]  # (n, len(FIGURES)), one row per planned layer


Share = Annotated[float, Field(ge=0, le=1)]
LowestSpeed = Annotated[float, Field(ge=0.01, le=1)]


class Fleet(Settings):
    """What is simulated, and what is slow or broken in it."""

    ranks: int = Field(default=2560, ge=1, le=1 << 20, description="ranks of all groups")
    batches: int = Field(default=100, ge=1, le=MOST_BATCHES, description="batches of each group")
    plans: int = Field(
        default=250_000,
        ge=1,
        le=20_000_000,
        description="layers that each variant plans at most, drawn from all batches",
    )
    seed: int = Field(default=0, ge=0, description="seed of everything that is drawn")
    slow_ranks: Share = Field(default=0.0, description="chance that a rank is slow")
    slowest: LowestSpeed = Field(
        default=0.5, description="lowest speed of slow ranks, where others have 1"
    )
    slow_links: Share = Field(default=0.0, description="chance that a rank's link is slow")
    slowest_link: LowestSpeed = Field(
        default=0.5, description="lowest speed of slow links, where others have 1"
    )
    dead_links: Share = Field(
        default=0.0, description="chance that two ranks cannot send each other weights"
    )


@dataclass(frozen=True)
class Simulation:
    """What one variant made of all groups."""

    variant: Variant
    traffic: SimulatedTraffic
    groups: int
    layers: int  # of all batches of all groups; not all may have been planned
    figures: Figures  # in order of groups, batches and layers

    def column(self, name: str) -> NDArray[np.float64]:
        """One of FIGURES, (n,)."""
        column: NDArray[np.float64] = self.figures[:, FIGURES.index(name)]
        return column


def draw_machine(fleet: Fleet, num_ranks: int, rng: np.random.Generator) -> GroupMachine:
    """A group's ranks, then their links, then what joins each two."""

    def drawn(chance: float, slowest: float) -> NDArray[np.float64]:
        is_slow, speed = rng.random(num_ranks) < chance, rng.uniform(slowest, 1, num_ranks)
        return np.where(is_slow, speed, 1.0)

    speeds = drawn(fleet.slow_ranks, fleet.slowest)
    links = drawn(fleet.slow_links, fleet.slowest_link)
    dead = np.triu(rng.random((num_ranks, num_ranks)) < fleet.dead_links, 1)
    return GroupMachine(
        whole_speeds(speeds.tolist()), float(speeds.max()), links, alive=~(dead | dead.T)
    )


def num_groups(fleet: Fleet, num_ranks: int) -> int:
    """Whole groups of ``num_ranks``. Raises ConfigError where there is none."""
    if fleet.ranks < num_ranks:
        raise ConfigError(f"--ranks = {fleet.ranks} is less than one group of --ep {num_ranks}")
    return fleet.ranks // num_ranks


def simulate(
    fleet: Fleet, traffic: SimulatedTraffic, variants: Sequence[Variant], processes: int
) -> Iterator[list[Figures]]:
    """Yield each group's figures, by variant, in order of groups; ``variants`` are of one size.

    All but ``plan_seconds`` is the same for any number of ``processes``.

    Raises:
        ConfigError: there are fewer ranks than one group has.
        UltraEPError: a worker process was lost.
    """
    groups = range(num_groups(fleet, variants[0].setting.num_ranks))
    if processes == 1:
        yield from map(_Work(fleet, traffic, variants).group, groups)
        return
    work = (fleet, traffic, variants)
    pool = ProcessPoolExecutor(
        min(processes, len(groups)), get_context("spawn"), _begin_worker, work
    )
    try:
        yield from pool.map(_group_of_worker, groups)
    except BrokenProcessPool as error:
        raise UltraEPError(
            "a worker process ended before its work did, perhaps for lack of memory; choose fewer "
            "--processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Work:
    """What one process does."""

    def __init__(
        self, fleet: Fleet, traffic: SimulatedTraffic, variants: Sequence[Variant]
    ) -> None:
        self._fleet, self._traffic, self._variants = fleet, traffic, variants
        self._num_ranks = variants[0].setting.num_ranks
        self._groups = num_groups(fleet, self._num_ranks)
        for variant in variants:
            warm_up(variant.context.shape)

    def group(self, index: int) -> list[Figures]:
        """One group's figures, by variant; the same whoever computes them."""
        rngs = [
            np.random.default_rng([self._fleet.seed, self._num_ranks, index, n]) for n in (1, 2, 3)
        ]
        machine = draw_machine(self._fleet, self._num_ranks, rngs[0])
        traffic = self._traffic.of_group(rngs[1])
        rows: list[list[tuple[float, ...]]] = [[] for _ in self._variants]
        for batch, layers in self._chosen(index, rngs[2]):
            for loads in over_source_ranks(traffic.expert_loads(batch, layers), self._num_ranks):
                for found, variant in zip(rows, self._variants, strict=True):
                    found.append(judge(variant, machine, loads))
        return [np.array(found).reshape(-1, len(FIGURES)) for found in rows]

    def _chosen(self, index: int, rng: np.random.Generator) -> Iterator[tuple[int, Counts]]:
        """Batches and their layers (n,) that are planned of a group: its part of all plans."""
        num_layers = self._traffic.num_layers
        every = self._fleet.batches * num_layers
        plans = min(self._fleet.plans, every * self._groups)
        count = plans * (index + 1) // self._groups - plans * index // self._groups
        cases = np.sort(rng.choice(every, count, replace=False, shuffle=False))
        changes = np.flatnonzero(np.diff(cases // num_layers)) + 1
        for part in np.split(cases, changes) if count else ():
            yield int(part[0]) // num_layers, part % num_layers


_worker: _Work | None = None  # of this process, where it is a worker


def _begin_worker(fleet: Fleet, traffic: SimulatedTraffic, variants: Sequence[Variant]) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this one
    _worker = _Work(fleet, traffic, variants)


def _group_of_worker(index: int) -> list[Figures]:
    assert _worker is not None  # _begin_worker
    return _worker.group(index)
