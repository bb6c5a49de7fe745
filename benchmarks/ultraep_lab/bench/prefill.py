"""Time to first token under each policy, measured so that a noisy machine favours none.

Every round sends one prompt per variant: the same text behind different openings, the variants in
an order that changes from round to round. Ratios within a round stay meaningful while the machine
drifts. Variants are the policies of one server.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import AfterValidator, Field

from ultraep_lab.bench.engine import FirstToken, Server
from ultraep_lab.bench.prompts import MAX_ROUNDS, Openings, PromptSource, fitted_prompt
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_lab.words import Each, Listed
from ultraep_serve.system.settings import Settings
from ultraep_serve.types import Policy

MIN_PROMPT_TOKENS = 32  # an opening alone may have a dozen
Variant = TypeVar("Variant")
OnStep = Callable[[str, float], None]  # before every request: what it is, and the share done
PromptTokens = Annotated[
    tuple[Annotated[int, Field(ge=MIN_PROMPT_TOKENS)], ...],
    Field(min_length=1, description="prompt lengths", json_schema_extra={"metavar": "N,..."}),
    Listed,
    Each,
]


def _different(policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    if len(set(policies)) < len(policies):
        raise ValueError("each policy can be named once")
    return policies


Policies = Annotated[
    tuple[Policy, ...],
    Field(
        min_length=1,
        description="policies to compare; ideal needs a server started with --allow-ideal",
        json_schema_extra={"metavar": "NAME,..."},
    ),
    Listed,
    AfterValidator(_different),
]


class PrefillOptions(Settings):
    """What to measure."""

    prompt_tokens: PromptTokens = (2048, 4096, 8192)
    policies: Policies = (Policy.OFF, Policy.QUOTA)
    repeats: int = Field(default=7, ge=1, description="rounds per length")
    warmup: int = Field(
        default=2, ge=0, description="requests per length and policy that are not measured"
    )
    seed: int = Field(default=0, ge=0, description="seed of the texts and of the order of policies")

    @property
    def tokens(self) -> int:
        """Of all prompts, warm-up included."""
        rounds = self.warmup + self.repeats
        return len(self.policies) * rounds * sum(self.prompt_tokens)


@dataclass(frozen=True)
class LengthResult:
    """One prompt length: ``samples[policy][i]`` is the time to first token in round i, seconds."""

    requested_tokens: int
    prompt_tokens: int  # median of what the server counted
    samples: Mapping[Policy, Sequence[float]]  # one per round for every policy

    def to_json(self) -> dict[str, Any]:
        """One entry of ``rows`` in the benchmark's JSON; None where a policy was not measured."""
        spreads = {policy: spread_of(samples) for policy, samples in self.samples.items()}
        medians = {policy: spread.pop("median") for policy, spread in spreads.items()}
        off, quota, ideal = map(medians.get, (Policy.OFF, Policy.QUOTA, Policy.IDEAL))
        gap = off - ideal if off is not None and ideal is not None else 0.0
        return {
            "prompt_tokens": self.prompt_tokens,
            "requested_tokens": self.requested_tokens,
            "rounds": min(len(samples) for samples in self.samples.values()),
            "ttft_seconds": _by_name(medians),
            "ttft_spread": _by_name(spreads),
            "ttft_samples": {policy.value: list(each) for policy, each in self.samples.items()},
            # The part of the best possible speed, and of the possible gain, that was reached.
            "efficiency": ideal / quota if ideal is not None and quota else None,
            "recovered": (off - quota) / gap if off and quota is not None and gap > 0 else None,
            "speedup": off / quota if off is not None and quota else None,
            "paired": {
                "quota_over_off": self._paired(Policy.QUOTA, Policy.OFF),
                "ideal_over_quota": self._paired(Policy.IDEAL, Policy.QUOTA),
            },
        }

    def _paired(self, numerator: Policy, denominator: Policy) -> dict[str, Any] | None:
        """The ratios within each round, which a drifting machine disturbs least."""
        if numerator not in self.samples or denominator not in self.samples:
            return None
        pairs = zip(self.samples[numerator], self.samples[denominator], strict=True)
        return ratios_json([above / below for above, below in pairs])


def _by_name(figures: Mapping[Policy, Any]) -> dict[str, Any]:
    return {policy.value: figure for policy, figure in figures.items()}


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
    on_step: OnStep = lambda description, share: None,
) -> PrefillResult:
    """Warm up, measure every length, and leave the policy of ``server`` as it was.

    The sidecar selects batches by wall-clock time, so its clock and this one must agree; on one
    machine they do. Raises ConfigError and BenchError with what to do.
    """
    for tokens in options.prompt_tokens:
        server.check_context(tokens)
    server.check_text(source(MIN_PROMPT_TOKENS, options.seed))
    run = _PrefillRun(server, sidecar, source, options, on_step)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with sidecar.policy_restored():
        for tokens in options.prompt_tokens:
            run.warm_up(tokens)
        since_ns = time.time_ns()
        lengths = tuple(run.measure(tokens) for tokens in options.prompt_tokens)
        measured = Policy.QUOTA if Policy.QUOTA in options.policies else options.policies[0]
        balance = sidecar.balance(since_ns, measured, len(lengths) * options.repeats)
    ranks = balance.get("num_ranks")
    return PrefillResult(
        started=started,
        lengths=lengths,
        balance=balance if measured is Policy.QUOTA else None,
        num_ranks=ranks if isinstance(ranks, int) else None,
    )


class _PrefillRun:
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
        self._asked = 0  # tokens

    def warm_up(self, tokens: int) -> None:
        """Unmeasured requests: connections, compilation and buffers for this length."""
        for _ in range(self._options.warmup):
            self._round(tokens, self._options.policies, f"{tokens} tokens, warm-up")

    def measure(self, tokens: int) -> LengthResult:
        """All rounds of one length, in ``balanced_orders`` one after another."""
        policies = self._options.policies
        orders = balanced_orders(policies)
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
            samples={policy: [each[policy].seconds for each in rounds] for policy in policies},
        )

    def _round(
        self, tokens: int, order: Sequence[Policy], description: str
    ) -> dict[Policy, FirstToken]:
        """One prompt per policy, all made before the first is sent."""
        prompts = self._prompts(tokens, len(order))
        results = {}
        for policy, prompt in zip(order, prompts, strict=True):
            self._on_step(f"{description}, {policy.value}", self._asked / self._options.tokens)
            self._asked += tokens
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


def balanced_orders(variants: Sequence[Variant]) -> list[list[Variant]]:
    """The fewest orders in which each variant takes every place, and follows every other one,
    equally often: Williams' design (Australian Journal of Scientific Research A 2, 1949).
    """
    count = len(variants)
    steps = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, -1, 2, -2, ...
    orders = [[variants[(first + step) % count] for step in steps] for first in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


def spread_of(samples: Sequence[float]) -> dict[str, float]:
    """Order statistics, by linear interpolation between samples."""
    values = np.percentile(samples, [0, 25, 50, 75, 100]).tolist()
    return dict(zip(("min", "p25", "median", "p75", "max"), values, strict=True))


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Confidence interval (95 %) of the median; None for fewer than six samples.

    From order statistics (the sign test), for any distribution.
    """
    from scipy.stats import quantile_test  # takes a second to import

    interval = quantile_test(samples, p=0.5).confidence_interval(confidence_level=0.95)
    return None if np.isnan(interval.low) else (float(interval.low), float(interval.high))


def ratios_json(ratios: Sequence[float]) -> dict[str, Any]:
    """Median of the ratios within rounds, its confidence interval, and their spread."""
    return {"interval": median_interval(ratios), **spread_of(ratios)}
