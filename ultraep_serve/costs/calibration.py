"""What a layer costs on this machine: measured at start-up by all ranks, fitted, and agreed on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.costs.model import CostModel
from ultraep_serve.types import ExpertShape

_LOGGER = logging.getLogger(__name__)
LEAST_ROWS = 96  # of an expert, from which its kernel runs as in a prefill
_ROWS_PER_MASTER = (LEAST_ROWS, 2 * LEAST_ROWS, 4 * LEAST_ROWS)
_LARGEST_ERROR = 0.25  # of a line through measurements, above which the log says so


@dataclass(frozen=True)
class Probes:
    """Timings of a rank's own stages, and the group's all-gather; all ranks call them alike."""

    seconds: Callable[[Callable[[], object]], float]  # that a call takes
    exchange: Callable[[], float]
    send_expert: Callable[[], float]
    plan: Callable[[], float]
    gather: Callable[[NDArray[np.float64]], NDArray[np.float64]]  # (n,) of a rank -> (R, n)
    bytes_before_relay: int  # that a rank sends until a relay has its first chunk
    rows_per_master: Sequence[int] = _ROWS_PER_MASTER  # of the batches that are timed


def agreed_costs(
    configured: CostModel | None,
    shape: ExpertShape,
    expert_bytes: int,
    probes: Probes,
    run_layer: Callable[[int], None],
) -> CostModel:
    """The ``configured`` cost model, or where there is none the mean of what ranks measure.

    A hop to a relay is a signal between ranks, which takes no longer than an exchange, behind what
    is sent until then.
    ``run_layer(n)`` computes and combines a batch that gives every rank ``n`` assignments. All
    ranks call this together and get the same.
    """
    if configured is not None:
        return configured
    sizes = [rows * shape.num_masters for rows in probes.rows_per_master]
    run_layer(sizes[0])
    # the sum over ranks does not grow with one rank's load, but is counted as if it did
    samples = [(float(size), probes.seconds(partial(run_layer, size))) for size in sizes]
    per_assignment, base = fit(samples)
    exchange, link = probes.exchange(), expert_bytes / probes.send_expert()
    own = np.array([per_assignment, base, exchange, link, probes.plan()])
    per_assignment, base, exchange, link, plan = probes.gather(own).mean(axis=0).tolist()
    return CostModel(
        seconds_per_assignment=per_assignment,
        base_seconds=base,
        bytes_per_expert=expert_bytes,
        exchange_seconds=exchange,
        link_bytes_per_second=link,
        plan_seconds=plan,
        relay_hop_seconds=exchange + min(probes.bytes_before_relay, expert_bytes) / link,
    )


def probe_loads(shape: ExpertShape) -> NDArray[np.int64]:
    """Loads (R, E) for timing a plan: all tokens choose the first rank's experts."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), dtype=np.int64)
    loads[:, : shape.num_masters] = 1 + np.arange(shape.num_masters)
    return loads


def fit(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """``seconds_per_assignment`` and ``base_seconds``, of (assignments, seconds) of one layer.

    That is the line of least squares, of errors relative to the measurement, so that small batches
    matter as much as large ones; it does not go below zero. Where noise hides how times grow, all
    of the largest batch's time counts as its work's: a start must not fail because the machine was
    busy, least of all on one rank while the others wait for it.
    """
    work, seconds = np.array(samples, np.float64).T
    weights = seconds**-2
    middle, level = (np.average(values, weights=weights) for values in (work, seconds))
    slope = weights @ ((work - middle) * (seconds - level)) / (weights @ (work - middle) ** 2)
    base = level - slope * middle
    if base < 0:
        base, slope = 0.0, (work / seconds).sum() / ((work / seconds) ** 2).sum()
    if not slope > 0:
        _LOGGER.warning("ultraep: costs are an upper bound: times do not grow with the work")
        return float(seconds[-1] / work[-1]), 0.0
    error = (np.abs(base + slope * work - seconds) / seconds).max()
    if error > _LARGEST_ERROR:
        _LOGGER.warning(
            "ultraep: costs are rough: experts' times are up to %.0f %% off a line; give --costs",
            100 * error,
        )
    return float(slope), float(base)
