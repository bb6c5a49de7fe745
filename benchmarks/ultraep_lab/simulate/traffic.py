"""Loads of many expert-parallel groups, made up or drawn from captured routing, by seed.

Every group has traffic of its own, and begins it at a moment of its own. Pictures of the traffic
take turns, ``period`` batches each, so that loads shift. What a group draws depends on its own
random numbers alone, not on other groups.

made up    A layer has an imbalance and popularity weights out of a pool, made as those of
           ``workloads``; every group shuffles ranks, and experts within ranks, which keeps the
           imbalance. A batch's assignments are drawn from the weights independently of each other.
captured   A batch is sequences (of a trace of loads: batches), drawn with replacement until it has
           as many tokens as it should on average; all layers see the same ones. Every trace is a
           picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.trace import Integers, LoadTrace, Trace, count_loads
from ultraep_lab.workloads import Workload, chances, popularities
from ultraep_serve.errors import ConfigError, TraceError

__all__ = ["Captured", "SimulatedTraffic", "Synthetic", "pieces_of"]

POOL = 8  # layers made up per imbalance
IMBALANCES = (1.3, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0)  # of made-up traffic, if none are asked for
MAX_PIECE_BYTES = 64 << 20  # of one trace; more sequences are merged
_MOST_ASSIGNMENTS = np.iinfo(np.int32).max  # of an expert: quotas are int32
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Synthetic:
    """Made-up traffic of groups of ``num_ranks``."""

    pictures: NDArray[np.float64]  # (pictures, pool, E): probabilities of an assignment
    num_ranks: int
    num_layers: int
    assignments: int  # per layer and batch, of all ranks
    period: int  # batches
    imbalances: Sequence[float]  # expected, of the pool's layers

    @classmethod
    def made(
        cls,
        workload: Workload,
        imbalances: Sequence[float] | None,
        num_layers: int,
        assignments: int,
    ) -> "Synthetic":
        """A pool of layers for each of ``imbalances``; sizes and period are the workload's.

        None are those of IMBALANCES that these ranks and experts can have. Raises TraceError where
        a given one cannot be reached, ConfigError for too large a batch.
        """
        _check_size(assignments)
        pools = {}
        for value in imbalances or IMBALANCES:
            try:
                layers = popularities(replace(workload, imbalance=value, num_layers=POOL))
                pools[value] = np.stack(layers)
            except TraceError:
                if imbalances or not pools:
                    raise
        weights = np.concatenate(list(pools.values()), axis=1)
        flat = weights.reshape(-1, workload.num_experts)
        expected = chances(flat, workload.top_k).reshape(weights.shape)
        probabilities = expected / expected.sum(-1, keepdims=True)
        return cls(
            probabilities,
            workload.num_ranks,
            num_layers,
            assignments,
            workload.period,
            tuple(pools),
        )

    def of_group(self, rng: np.random.Generator) -> "_SyntheticGroup":
        """One group's traffic, drawn from ``rng`` now and later."""
        num_pictures, pool, num_experts = self.pictures.shape
        masters = np.arange(num_experts).reshape(self.num_ranks, -1)
        layers = np.zeros((self.num_layers, 1, 1), np.int64)
        ranks = rng.permuted(layers[:, :, 0] + np.arange(self.num_ranks), axis=1)
        order = rng.permuted(layers + masters, axis=2)
        shuffled = np.take_along_axis(order, ranks[:, :, None], axis=1)
        return _SyntheticGroup(
            self,
            rng,
            start=int(rng.integers(num_pictures * self.period)),
            chosen=rng.integers(pool, size=self.num_layers),
            experts=shuffled.reshape(self.num_layers, num_experts),
        )


@dataclass(frozen=True)
class _SyntheticGroup:
    traffic: Synthetic
    rng: np.random.Generator
    start: int
    chosen: Counts  # (layers,) of the pool
    experts: Counts  # (layers, E): which of the pool's experts each one is

    def expert_loads(self, batch: int, layers: Integers) -> Counts:
        """Assignments (n, E) of ``layers`` (n,) in a batch; draws: calls count, and their order."""
        pictures = self.traffic.pictures
        picture = pictures[(self.start + batch) // self.traffic.period % len(pictures)]
        chance = np.take_along_axis(picture[self.chosen[layers]], self.experts[layers], axis=1)
        return self.rng.multinomial(self.traffic.assignments, chance)


@dataclass(frozen=True)
class Captured:
    """Traffic drawn from traces, one picture each."""

    pictures: Sequence[Integers]  # each (pieces, layers, E): loads of sequences or batches
    draws: Sequence[int]  # pieces that make a batch, by picture
    period: int  # batches

    @classmethod
    def drawn(cls, pictures: Sequence[Integers], assignments: int, period: int) -> "Captured":
        """Batches of about ``assignments`` per layer; ``pictures`` as ``pieces_of`` makes them.

        Raises ConfigError: traces of different models, without assignments, or too large a batch.
        """
        _check_size(assignments)
        if len({picture.shape[1:] for picture in pictures}) > 1:
            raise ConfigError("the traces have different layers or experts; they are of one model")
        draws = []
        for picture in pictures:
            sizes = picture.sum(-1, dtype=np.int64)  # (pieces, layers)
            if not sizes.size or not sizes.any():
                raise ConfigError("a trace has no assignments")
            draws.append(max(1, round(assignments / float(sizes.mean()))))
            _check_size(draws[-1] * int(sizes.max()))
        return cls(pictures, draws, period)

    @property
    def num_layers(self) -> int:
        """MoE layers of the traces."""
        return int(self.pictures[0].shape[1])

    @property
    def imbalances(self) -> Sequence[float]:
        """None is made up."""
        return ()

    def of_group(self, rng: np.random.Generator) -> "_CapturedGroup":
        """One group's traffic, drawn from ``rng`` now and later."""
        return _CapturedGroup(self, rng, int(rng.integers(len(self.pictures) * self.period)))


@dataclass(frozen=True)
class _CapturedGroup:
    traffic: Captured
    rng: np.random.Generator
    start: int

    def expert_loads(self, batch: int, layers: Integers) -> Counts:
        """As of ``_SyntheticGroup``."""
        traffic = self.traffic
        index = (self.start + batch) // traffic.period % len(traffic.pictures)
        pieces = traffic.pictures[index]
        often = self.rng.multinomial(traffic.draws[index], np.full(len(pieces), 1 / len(pieces)))
        drawn = np.flatnonzero(often)
        loads: Counts = np.einsum("p,ple->le", often[drawn], pieces[np.ix_(drawn, layers)])
        return loads


SimulatedTraffic = Synthetic | Captured


def pieces_of(trace: Trace | LoadTrace) -> Integers:
    """Loads (pieces, layers, E) of a trace's sequences, or batches where it is of loads.

    Neighbouring sequences are merged where they would otherwise take too much memory. Raises
    TraceError where there are no tokens.
    """
    if isinstance(trace, LoadTrace):
        loads = trace.loads.astype(np.int64)
        return loads if loads.ndim == 3 else np.asarray(loads.sum(2))
    if not trace.num_tokens:
        raise TraceError("the trace has no tokens")
    ends = trace.sequence_lengths.astype(np.int64).cumsum()
    step = -(-ends.size * 4 * trace.num_layers * trace.num_experts // MAX_PIECE_BYTES)
    bounds = np.unique(np.concatenate([[0], ends[step - 1 :: step], [trace.num_tokens]]))
    pieces = [
        count_loads(trace.topk_ids[first:last], 1, trace.num_experts)[:, 0]
        for first, last in pairwise(bounds)
    ]
    return np.stack(pieces)


def _check_size(assignments: int) -> None:
    if assignments > _MOST_ASSIGNMENTS:
        raise ConfigError(
            f"a batch has up to {assignments} assignments per layer, at most {_MOST_ASSIGNMENTS} "
            "can be planned; choose a smaller --rank-tokens or --ep"
        )
