"""Which way experts are computed on a CPU: timed when a model is loaded, the same on all ranks.

CPUs differ in what they multiply quickly, and a way that wins with many rows of an expert may lose
with few. So an adapter lists the ways that a layer has, here they are timed on made-up batches of
the layer's own sizes, and from the slowest rank's times every rank derives the same choice.

A way is exact if what an expert gives for a token does not depend on the tokens beside it, so that
answers do not depend on the rank that computes them. That is looked at here, not assumed.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.cpu_experts import Rows
from ultraep_serve.errors import ConfigError
from ultraep_serve.types import CheckResult

__all__ = [
    "NAMES",
    "ROWS",
    "ChosenWays",
    "Sample",
    "Way",
    "choose_for_kinds",
    "decide",
    "is_exact",
    "nanoseconds_of",
]

NAMES = ("kernel", "products", "float32", "tiles", "sums")  # of ways; an earlier one wins a tie
ROWS = (4, 64, 256)  # of an expert on average, for which ways are timed
_TIE = 1.03  # times the fastest
_HOPELESS = (30, 3)  # times the fastest exact way with ROWS[0] and ROWS[1]: not waited for further
_MOST_EXPERTS = 8  # of a rank that made-up batches have
_RUNS, _LONG = 8, 0.3  # at most so many runs; no other one behind so many seconds
_NEVER = 1 << 60  # nanoseconds of a way that a rank does not have

Names: TypeAlias = tuple[tuple[int, str], ...]  # with how many rows of an expert a way begins
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Compute: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Rows], None]


@dataclass(frozen=True)
class Way:
    """A way of computing one layer's experts.

    ``compute`` takes tokens (T, H), their weights (T, K) and local experts (T, K), -1 for another
    rank's. It writes a row for every assignment, or with ``sums`` one for every token that has any.
    """

    name: str
    compute: Compute
    sums: bool = False

    def rows(self, x: torch.Tensor, topk_weights: torch.Tensor, local: torch.Tensor) -> Rows:
        """What this rank's experts give, in memory of its own."""
        place = torch.empty(local.shape, dtype=torch.int32)
        outputs = Rows(place, x.new_empty(local.numel(), x.shape[1]))
        self.compute(x, topk_weights, local, outputs)
        return outputs

    def total(
        self, x: torch.Tensor, topk_weights: torch.Tensor, local: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of the output (T, H) float32."""
        return self.rows(x, topk_weights, local).added_up()


@dataclass(frozen=True)
class Sample:
    """What made-up batches of a layer are made from."""

    num_local_experts: int
    num_ranks: int
    experts_per_token: int
    hidden_size: int
    dtype: torch.dtype

    def batch(self, rows: int) -> Batch:
        """Tokens (T, H), weights (T, K) and local experts (T, K), ``rows`` of each expert."""
        generator = torch.Generator().manual_seed(0)
        experts, top_k = min(self.num_local_experts, _MOST_EXPERTS), self.experts_per_token
        # With more ranks most tokens would have none of their experts here.
        places = experts * min(self.num_ranks, top_k)
        num_tokens = max(1, rows * places // top_k)
        local = torch.randint(places, (num_tokens, top_k), generator=generator, dtype=torch.int32)
        x = torch.randn(num_tokens, self.hidden_size, generator=generator).to(self.dtype)
        weights = torch.rand(num_tokens, top_k, generator=generator)
        return x, weights, torch.where(local < experts, local, -1)


@dataclass(frozen=True)
class ChosenWays:
    """The ways of one layer that were chosen, by how many rows of an expert they begin with."""

    begin: tuple[tuple[int, Way], ...]  # rising from 0

    def of(self, rows: int) -> Way:
        """The way for a batch that has ``rows`` of an expert on average."""
        return next(way for first, way in reversed(self.begin) if first <= rows)


def choose_for_kinds(
    ways: Sequence[Sequence[Way]],
    samples: Iterable[Sample],
    group: dist.ProcessGroup,
    config: BalanceConfig,
) -> tuple[list[ChosenWays], CheckResult]:
    """``_choose`` for each layer's ``ways``, once for layers of the same sizes and ways."""
    found: dict[Any, tuple[Names, CheckResult]] = {}
    chosen = []
    for own, sample in zip(ways, samples, strict=True):
        kind = sample, tuple(way.name for way in own)
        if kind not in found:
            found[kind] = _choose(own, sample, group, config)
        by_name = {way.name: way for way in own}
        chosen.append(ChosenWays(tuple((rows, by_name[name]) for rows, name in found[kind][0])))
    results = [result for _, result in found.values()]
    detail = "; ".join(dict.fromkeys(result.detail for result in results))
    return chosen, CheckResult("experts", sum(result.seconds for result in results), detail)


def _choose(
    ways: Sequence[Way], sample: Sample, group: dist.ProcessGroup, config: BalanceConfig
) -> tuple[Names, CheckResult]:
    """Names of the chosen ways, the same on all ranks, and what was measured.

    ``ways`` of a layer in the order of ``NAMES``, of which the first is the engine's own. All ranks
    of ``group`` call it together. Raises ConfigError, on all ranks alike, where one does not have
    the way that was asked for, PeerTimeoutError when one does not come.
    """
    start = time.perf_counter()
    is_measured = config.experts == "auto" and len(ways) > 1
    own = _measure(ways, sample) if is_measured else _unmeasured(ways)
    ranks = HostAllGather(group, config.timeout_seconds * CONNECT_FACTOR)
    slowest = ranks.gather(own.reshape(-1)).max(axis=0).reshape(own.shape)
    nanoseconds, exact = slowest[:, :-1], slowest[:, -1] == 0
    available = [name for name, row in zip(NAMES, nanoseconds, strict=True) if row[0] < _NEVER]
    names: Names
    if config.experts == "auto":
        names = decide(nanoseconds, exact | (config.numerics == "engine"))
    elif config.experts in available:
        names = ((0, config.experts),)
    else:
        raise ConfigError(
            f"--experts {config.experts}: not every rank can compute this model's experts so; "
            f"choose from auto, {', '.join(available)}"
        )
    detail = _detail(names, nanoseconds, exact)
    return names, CheckResult("experts", time.perf_counter() - start, detail)


def decide(nanoseconds: NDArray[np.int64], allowed: NDArray[np.bool_]) -> Names:
    """The best of the ``allowed`` (W,) of ``NAMES``, from their times (W, N) with ``ROWS``.

    Of those that are within 3 % of the fastest, the first one; any, where none is allowed. Where
    another one is best with more rows, it begins where lines through the times of both cross.
    """
    times = np.where(allowed[:, None], nanoseconds, _NEVER)
    times = np.where(times.min(axis=0) < _NEVER, times, nanoseconds)
    best = (times <= times.min(axis=0) * _TIE).argmax(axis=0).tolist()
    names = [(0, NAMES[best[0]])]
    for column in range(1, len(best)):
        before, after = best[column - 1], best[column]
        if before == after:
            continue
        slower = max(0, int(times[after, column - 1] - times[before, column - 1]))
        faster = max(1, int(times[before, column] - times[after, column]))
        rows, more = ROWS[column - 1 : column + 1]
        names.append((rows + -(-(more - rows) * slower // (slower + faster)), NAMES[after]))
    return tuple(names)


def _unmeasured(ways: Sequence[Way]) -> NDArray[np.int64]:
    """As ``_measure``, where there is nothing to choose: 0 ns for each way that there is."""
    has = [any(way.name == name for way in ways) for name in NAMES]
    row = [0] * (len(ROWS) + 1)
    return np.array([row if there else [_NEVER] * len(row) for there in has], np.int64)


def _measure(ways: Sequence[Way], sample: Sample) -> NDArray[np.int64]:
    """Nanoseconds (W, N) of ``NAMES`` by ``ROWS``, and in a last column 0 for each exact one."""
    found = np.full((len(NAMES), len(ROWS) + 1), _NEVER, np.int64)
    measured = list(ways)
    with torch.inference_mode():
        for way in ways:
            way.total(*sample.batch(1))  # what is compiled on its first call is not timed
        for column, rows in enumerate(ROWS):
            batch = sample.batch(rows)
            calls = [partial(way.total, *batch) for way in measured]
            times = dict(zip(measured, nanoseconds_of(*calls), strict=True))
            exact = [way for way in measured if way is ways[0] or not way.sums]
            if column > 0:
                exact = [way for way in exact if way is ways[0] or is_exact(way, batch)]
            for way, taken in times.items():
                found[NAMES.index(way.name), column] = taken
                found[NAMES.index(way.name), -1] = 0 if way in exact else _NEVER
            if column < len(_HOPELESS):
                most = min(times[way] for way in exact) * _HOPELESS[column]
                is_first = column == 0  # when it is not known yet what is exact
                measured = [
                    way for way in measured if times[way] <= most or (is_first and way is ways[0])
                ]
    return found


def nanoseconds_of(*calls: Callable[[], object]) -> list[int]:
    """How long each of ``calls`` takes: the shortest of a few runs, or of one that is long.

    Calls take turns, so that what disturbs one for a while disturbs the others too.
    """
    taken: list[list[int]] = [[] for _ in calls]
    for _ in range(_RUNS):
        for own, call in zip(taken, calls, strict=True):
            if sum(own) < _LONG * 1e9:
                start = time.perf_counter_ns()
                call()
                own.append(time.perf_counter_ns() - start)
    return [min(own) for own in taken]


def is_exact(way: Way, batch: Batch) -> bool:
    """Whether outputs are the same where some of the assignments of ``batch`` are computed apart.

    Of every expert another share is, so that products of many sizes are compared.
    """
    x, weights, local = batch
    rows = x.repeat_interleave(local.shape[1], dim=0)  # each for one assignment: nothing is added
    weights, local = weights.reshape(-1, 1), local.reshape(-1, 1)
    generator = torch.Generator().manual_seed(1)
    share = (1 + local.clamp(min=0)) / (2 + local.max())
    apart = torch.rand(local.shape, generator=generator) < share
    here = way.total(rows, weights, torch.where(apart, local, -1))
    there = way.total(rows, weights, torch.where(apart, -1, local))
    return torch.equal(here + there, way.total(rows, weights, local))


def _detail(names: Names, nanoseconds: NDArray[np.int64], exact: NDArray[np.bool_]) -> str:
    """The choice, and the times that it was made by, for the log and ``status``."""
    changes = [f"{name} from {rows} rows of an expert" if rows else name for rows, name in names]
    times = [
        f"{name}{'' if same else ' (not exact)'} "
        + " ".join("-" if taken >= _NEVER else f"{taken / 1e6:.3g}" for taken in row)
        for name, row, same in zip(NAMES, nanoseconds, exact, strict=True)
        if 0 < row[0] < _NEVER
    ]
    sizes = " ".join(map(str, ROWS))
    return ", ".join(changes) + (f"; ms at {sizes} rows: {', '.join(times)}" if times else "")
