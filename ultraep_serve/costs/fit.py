"""Costs from measurements: straight lines through (work, seconds) by least squares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultraep_serve.errors import ConfigError

__all__ = ["LineFit", "fit", "fit_bandwidth"]


@dataclass(frozen=True)
class LineFit:
    """``seconds = intercept + slope * work`` and how far it is off the measurements."""

    slope: float  # seconds per unit of work
    intercept: float  # seconds, >= 0
    worst_relative_error: float  # of the seconds that were measured

    def predict(self, work: float) -> float:
        """Seconds for ``work``."""
        return self.intercept + self.slope * work


def fit(samples: Sequence[tuple[float, float]]) -> LineFit:
    """Least squares through (assignments of the busiest rank, seconds of the layer).

    The slope is ``seconds_per_assignment``, the intercept ``base_seconds``. Errors are weighed
    relative to the measurement, because a prediction that is off by a share is as bad for a small
    batch as for a large one. An intercept below zero cannot be: the line then goes through zero.

    Raises:
        ConfigError: fewer than two different amounts of work, values that are not positive, or
            times that do not grow with the work.
    """
    work, seconds = _columns(samples)
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


def fit_bandwidth(samples: Sequence[tuple[float, float]]) -> tuple[float, LineFit]:
    """Bytes per second from (bytes sent by the busiest rank, seconds); the line has the latency.

    Raises ConfigError as ``fit``.
    """
    line = fit(samples)
    return 1 / line.slope, line


def _columns(
    samples: Sequence[tuple[float, float]],
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]
]:
    work = np.array([sample[0] for sample in samples], np.float64)
    seconds = np.array([sample[1] for sample in samples], np.float64)
    if np.unique(work).size < 2:
        raise ConfigError(f"{work.size} samples do not make a line; measure two sizes or more")
    if not (np.isfinite(work).all() and np.isfinite(seconds).all()):
        raise ConfigError("measurements must be finite numbers")
    if (work < 0).any() or (seconds <= 0).any():
        raise ConfigError("work must not be negative and seconds must be more than 0")
    return work, seconds
