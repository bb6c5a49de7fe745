"""From samples of the time to first token to the figures of one table row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ultraep_serve.types import Policy

__all__ = ["LengthResult", "Spread", "median_interval", "ratios_json"]


@dataclass(frozen=True)
class Spread:
    """Order statistics of one set of samples."""

    min: float
    p25: float
    median: float
    p75: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Linear interpolation between samples, numpy's default."""
        return cls(*(float(value) for value in np.percentile(samples, [0, 25, 50, 75, 100])))


@dataclass(frozen=True)
class LengthResult:
    """One prompt length: ``samples[policy][i]`` is the time to first token in round i, seconds."""

    requested_tokens: int
    prompt_tokens: int  # median of what the server counted
    samples: Mapping[Policy, Sequence[float]]  # one per round for every policy

    def median(self, policy: Policy) -> float | None:
        """Median time to first token, seconds; None for a policy that was not measured."""
        return Spread.of(self.samples[policy]).median if policy in self.samples else None

    @property
    def efficiency(self) -> float | None:
        """ideal / quota: the part of the best possible speed that was reached."""
        return _ratio(self.median(Policy.IDEAL), self.median(Policy.QUOTA))

    @property
    def speedup(self) -> float | None:
        """off / quota."""
        return _ratio(self.median(Policy.OFF), self.median(Policy.QUOTA))

    @property
    def recovered(self) -> float | None:
        """(off - quota) / (off - ideal); None where the ideal is no faster than off."""
        compared = (Policy.OFF, Policy.QUOTA, Policy.IDEAL)
        off, quota, ideal = (self.median(policy) for policy in compared)
        if off is None or quota is None or ideal is None or ideal >= off:
            return None
        return (off - quota) / (off - ideal)

    def paired(self, numerator: Policy, denominator: Policy) -> list[float] | None:
        """The ratio within each round, which a drifting machine disturbs least."""
        if numerator not in self.samples or denominator not in self.samples:
            return None
        above, below = self.samples[numerator], self.samples[denominator]
        return [a / b for a, b in zip(above, below, strict=True)]

    def to_json(self) -> dict[str, Any]:
        """One entry of ``rows`` in the benchmark's JSON."""
        spreads = {policy: Spread.of(samples) for policy, samples in self.samples.items()}
        ratios = {
            "quota_over_off": self.paired(Policy.QUOTA, Policy.OFF),
            "ideal_over_quota": self.paired(Policy.IDEAL, Policy.QUOTA),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "requested_tokens": self.requested_tokens,
            "rounds": min(len(samples) for samples in self.samples.values()),
            "ttft_seconds": {policy.value: spread.median for policy, spread in spreads.items()},
            "ttft_spread": {policy.value: _quartiles(spread) for policy, spread in spreads.items()},
            "ttft_samples": {policy.value: list(self.samples[policy]) for policy in spreads},
            "efficiency": self.efficiency,
            "recovered": self.recovered,
            "speedup": self.speedup,
            "paired": {name: ratios_json(each) if each else None for name, each in ratios.items()},
        }


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Where the median of all that could be sampled lies, with 95 % confidence.

    From order statistics (the sign test): nothing is assumed of the distribution. None for fewer
    than six samples, which cannot tell.
    """
    from scipy.stats import quantile_test  # takes a second to import

    interval = quantile_test(samples, p=0.5).confidence_interval(confidence_level=0.95)
    return None if np.isnan(interval.low) else (float(interval.low), float(interval.high))


def ratios_json(ratios: Sequence[float]) -> dict[str, Any]:
    """Median of the ratios within rounds, where it lies, and their spread."""
    spread = Spread.of(ratios)
    interval = median_interval(ratios)
    return {"median": spread.median, "interval": interval, **_quartiles(spread)}


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _quartiles(spread: Spread) -> dict[str, float]:
    return {"min": spread.min, "p25": spread.p25, "p75": spread.p75, "max": spread.max}
