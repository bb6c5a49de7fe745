"""What a layer costs on this machine: measured at start-up by all ranks, fitted, and agreed on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.types import ExpertShape

__all__ = ["LEAST_ROWS", "LineFit", "Probes", "agreed_costs", "fit", "probe_loads"]

_LOGGER = logging.getLogger(__name__)
LEAST_ROWS = 96  # of an expert, from which its kernel runs as in a prefill
_ROWS_PER_MASTER = (LEAST_ROWS, 2 * LEAST_ROWS, 4 * LEAST_ROWS)
_LARGEST_ERROR = 0.25  # of a line through measurements, above which the log says so
_MEASURED = (
    "seconds_per_assignment",
    "base_seconds",
    "link_bytes_per_second",
    "exchange_seconds",
    "plan_seconds",
)


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
    configured: str,
    shape: ExpertShape,
    expert_bytes: int,
    probes: Probes,
    run_layer: Callable[[int], None],
) -> CostModel:
    """The ``configured`` cost model (JSON), or where it is empty the mean of what ranks measure.

    A hop to a relay is a signal between ranks, which takes no longer than an exchange, behind what
    is sent until then.
    ``run_layer(n)`` computes and combines a batch that gives every rank ``n`` assignments. All
    ranks call this together and get the same.
    """
    if configured:
        return CostModel.from_json(configured)
    own = _measure_costs(shape, expert_bytes, probes, run_layer)
    measured = np.array([getattr(own, name) for name in _MEASURED], dtype=np.float64)
    agreed = probes.gather(measured).mean(axis=0)
    costs = replace(own, **dict(zip(_MEASURED, agreed.tolist(), strict=True)))
    before = min(probes.bytes_before_relay, expert_bytes) / costs.link_bytes_per_second
    return replace(costs, relay_hop_seconds=costs.exchange_seconds + before)


def _measure_costs(
    shape: ExpertShape, expert_bytes: int, probes: Probes, run_layer: Callable[[int], None]
) -> CostModel:
    """Time a layer, an expert's transfer, an exchange and a plan.

    The sum over ranks does not grow with one rank's load, but is counted as if it did.
    """
    sizes = [rows * shape.num_masters for rows in probes.rows_per_master]
    run_layer(sizes[0])
    samples = [(float(size), probes.seconds(partial(run_layer, size))) for size in sizes]
    line = _line_through(samples)
    return CostModel(
        seconds_per_assignment=line.slope,
        base_seconds=line.intercept,
        bytes_per_expert=expert_bytes,
        exchange_seconds=probes.exchange(),
        link_bytes_per_second=expert_bytes / probes.send_expert(),
        plan_seconds=probes.plan(),
    )


def _line_through(samples: Sequence[tuple[float, float]]) -> "LineFit":
    """``fit``, or where noise hides how times grow, all of the largest batch's time as its work's.

    A start must not fail because the machine was busy, least of all on one rank while the others
    wait for it.
    """
    try:
        line = fit(samples)
    except ConfigError as error:
        work, seconds = samples[-1]
        _LOGGER.warning("ultraep: costs are an upper bound: %s", error)
        return LineFit(seconds / work, 0.0, float("inf"))
    if line.worst_relative_error > _LARGEST_ERROR:
        _LOGGER.warning(
            "ultraep: costs are rough: experts' times are up to %.0f %% off a line; give --costs",
            100 * line.worst_relative_error,
        )
    return line


def probe_loads(shape: ExpertShape) -> NDArray[np.int64]:
    """Loads (R, E) for timing a plan: all tokens choose the first rank's experts."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), dtype=np.int64)
    loads[:, : shape.num_masters] = 1 + np.arange(shape.num_masters)
    return loads


@dataclass(frozen=True)
class LineFit:
    """``seconds = intercept + slope * work``, and how far the measurements are from it."""

    slope: float  # seconds per unit of work
    intercept: float  # seconds, >= 0
    worst_relative_error: float  # of the measured seconds


def fit(samples: Sequence[tuple[float, float]]) -> LineFit:
    """Least squares through (assignments of the busiest rank, seconds of the layer).

    The slope is ``seconds_per_assignment``, the intercept ``base_seconds``. Errors are relative to
    the measurement, so that small batches matter as much as large ones. Where the intercept would
    be below zero, the line goes through zero.

    Raises:
        ConfigError: fewer than two different amounts of work, values that are not positive, or
            times that do not grow with the work.
    """
    work, seconds = np.array(samples, np.float64).reshape(-1, 2).T
    if np.unique(work).size < 2:
        raise ConfigError(f"{work.size} samples do not make a line; measure two sizes or more")
    if not (np.isfinite(work).all() and np.isfinite(seconds).all()):
        raise ConfigError("measurements must be finite numbers")
    if (work < 0).any() or (seconds <= 0).any():
        raise ConfigError("work must be 0 or more and seconds more than 0")
    weights = 1 / seconds
    design = np.stack([np.ones_like(work), work], 1) * weights[:, None]
    # Columns of like size: assignments are thousands, and the solver's cut-off is relative.
    scale = np.abs(design).max(0)
    solution, *_ = np.linalg.lstsq(design / scale, np.ones_like(work), rcond=None)
    intercept, slope = (solution / scale).tolist()
    if intercept < 0:
        ratio = work * weights
        intercept, slope = 0.0, float(ratio.sum() / (ratio**2).sum())
    if not slope > 0:
        raise ConfigError(
            "the measured times do not grow with the work; measure longer, over a wider range"
        )
    errors = np.abs(intercept + slope * work - seconds) / seconds
    return LineFit(slope, intercept, float(errors.max()))
