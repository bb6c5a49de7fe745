"""Time to first token under each policy, measured so that a noisy machine favours none.

Every round sends one prompt per policy: the same text behind different openings, the policies in
an order that changes from round to round. Ratios within a round stay meaningful while the machine
drifts.
"""

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any

import numpy as np

from ultraep_serve.client.engine import FirstToken, Server
from ultraep_serve.client.prompts import MAX_ROUNDS, Openings, PromptSource, fitted_prompt
from ultraep_serve.client.sidecar import Sidecar
from ultraep_serve.errors import ConfigError
from ultraep_serve.types import Policy

__all__ = [
    "LengthResult",
    "PrefillOptions",
    "PrefillResult",
    "Spread",
    "measure_prefill",
    "median_interval",
    "ratios_json",
]

MIN_PROMPT_TOKENS = 32  # an opening alone may have a dozen
OnStep = Callable[[str], None]  # called before every request with a description of it


@dataclass(frozen=True)
class PrefillOptions:
    """What to measure. Raises ConfigError naming a flag that is out of range."""

    prompt_tokens: tuple[int, ...] = (2048, 4096, 8192)
    policies: tuple[Policy, ...] = (Policy.OFF, Policy.QUOTA, Policy.IDEAL)
    repeats: int = 7  # measured rounds per length
    warmup: int = 2  # unmeasured requests per length and policy
    seed: int = 0  # of the texts and of the order of policies

    def __post_init__(self) -> None:
        if not self.prompt_tokens or min(self.prompt_tokens) < MIN_PROMPT_TOKENS:
            raise ConfigError(f"--prompt-tokens must be {MIN_PROMPT_TOKENS} or more, each")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ConfigError("--policies must name each policy at most once, and at least one")
        if self.seed < 0:
            raise ConfigError(f"--seed = {self.seed} must be 0 or more")
        if self.repeats < 1:
            raise ConfigError(f"--repeats = {self.repeats} must be 1 or more")
        if self.warmup < 0:
            raise ConfigError(f"--warmup = {self.warmup} must be 0 or more")

    @property
    def num_requests(self) -> int:
        """Requests that will be sent, warm-up included."""
        return len(self.prompt_tokens) * len(self.policies) * (self.warmup + self.repeats)


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


@dataclass(frozen=True)
class PrefillResult:
    """Everything that one run measured."""

    started: str  # UTC, ISO 8601
    lengths: tuple[LengthResult, ...]
    balance: dict[str, Any] | None  # the sidecar's statistics of the quota rounds
    num_ranks: int | None  # as the sidecar says


def measure_prefill(
    server: Server,
    sidecar: Sidecar,
    source: PromptSource,
    options: PrefillOptions,
    on_step: OnStep = lambda description: None,
) -> PrefillResult:
    """Warm up, measure every length, and leave the policy as it was.

    The sidecar selects batches by wall-clock time, so its clock and this one must agree; on one
    machine they do. Raises ConfigError and BenchError with what to do.
    """
    for tokens in options.prompt_tokens:
        server.check_context(tokens)
    server.check_text(source(MIN_PROMPT_TOKENS, options.seed))
    run = _Run(server, sidecar, source, options, on_step)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with sidecar.policy_restored():
        for tokens in options.prompt_tokens:
            run.warm_up(tokens)
        since_ns = time.time_ns()
        lengths = tuple(run.measure(tokens) for tokens in options.prompt_tokens)
        measured = Policy.QUOTA if Policy.QUOTA in options.policies else options.policies[0]
        requests = sum(len(length.samples.get(Policy.QUOTA, ())) for length in lengths)
        balance = sidecar.balance(since_ns, measured, requests)
    ranks = balance.get("num_ranks")
    return PrefillResult(
        started=started,
        lengths=lengths,
        balance=balance if measured is Policy.QUOTA else None,
        num_ranks=ranks if isinstance(ranks, int) else None,
    )


class _Run:
    """The requests of one benchmark, numbered so that each text and each opening is used once."""

    def __init__(
        self,
        server: Server,
        sidecar: Sidecar,
        source: PromptSource,
        options: PrefillOptions,
        on_step: OnStep,
    ) -> None:
        self._server, self._sidecar, self._source = server, sidecar, source
        self._options, self._on_step = options, on_step
        self._openings = Openings()
        self._chooser = random.Random(options.seed)
        self._next_seed = options.seed

    def warm_up(self, tokens: int) -> None:
        """Unmeasured requests: connections, compilation and buffers for this length."""
        for _ in range(self._options.warmup):
            self._round(tokens, self._options.policies, f"{tokens} tokens, warm-up")

    def measure(self, tokens: int) -> LengthResult:
        """All rounds of one length; every policy takes every place in the order equally often."""
        orders = list(itertools.permutations(self._options.policies))
        self._chooser.shuffle(orders)
        rounds = [
            self._round(tokens, orders[i % len(orders)], f"{tokens} tokens, round {i + 1}")
            for i in range(self._options.repeats)
        ]
        counted = [one.prompt_tokens for each in rounds for one in each.values()]
        known = [count for count in counted if count is not None]
        return LengthResult(
            requested_tokens=tokens,
            prompt_tokens=round(median(known)) if known else tokens,
            samples={
                policy: [each[policy].seconds for each in rounds]
                for policy in self._options.policies
            },
        )

    def _round(
        self, tokens: int, policies: Sequence[Policy], description: str
    ) -> dict[Policy, FirstToken]:
        """One prompt per policy, all made before the first is sent."""
        prompts = self._prompts(tokens, len(policies))
        results = {}
        for policy, prompt in zip(policies, prompts, strict=True):
            self._on_step(f"{description}, {policy.value}")
            self._sidecar.set_policy(policy)
            results[policy] = self._server.first_token(prompt)
        return results

    def _prompts(self, tokens: int, number: int) -> list[str]:
        """The same text behind ``number`` openings, each of ``tokens`` tokens."""
        seed, count = self._next_seed, self._server.count_tokens
        self._next_seed += MAX_ROUNDS + 1  # fitting draws from the seeds in between
        return [
            fitted_prompt(self._openings, self._source, tokens, seed, count) for _ in range(number)
        ]


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Confidence interval (95 %) of the median.

    From order statistics (the sign test), for any distribution. None for fewer
    than six samples, which are too few.
    """
    from scipy.stats import quantile_test  # takes a second to import

    interval = quantile_test(samples, p=0.5).confidence_interval(confidence_level=0.95)
    return None if np.isnan(interval.low) else (float(interval.low), float(interval.high))


def ratios_json(ratios: Sequence[float]) -> dict[str, Any]:
    """Median of the ratios within rounds, its confidence interval, and their spread."""
    spread = Spread.of(ratios)
    interval = median_interval(ratios)
    return {"median": spread.median, "interval": interval, **_quartiles(spread)}


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _quartiles(spread: Spread) -> dict[str, float]:
    return {"min": spread.min, "p25": spread.p25, "p75": spread.p75, "max": spread.max}
