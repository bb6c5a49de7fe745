"""Time to first token under each policy, measured so that a noisy machine favours none.

Every round sends one prompt per variant: the same text behind different openings, the variants in
an order that changes from round to round. Ratios within a round stay meaningful while the machine
drifts. Variants are the policies of a balanced server and, where there is one, a second server
without expert parallelism.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from ultraep_lab.bench.engine import FirstToken, Server, ServerWithoutEP
from ultraep_lab.bench.prompts import MAX_ROUNDS, Openings, PromptSource, fitted_prompt
from ultraep_lab.bench.sidecar import Sidecar
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.settings import Each, Listed, Settings, Shown
from ultraep_serve.types import Policy

__all__ = [
    "WITHOUT_EP",
    "LengthResult",
    "Policies",
    "PrefillOptions",
    "PrefillResult",
    "PromptTokens",
    "Servers",
    "Turns",
    "balanced_orders",
    "measure_prefill",
    "median_interval",
    "ratios_json",
    "spread_of",
]

WITHOUT_EP = "without_ep"  # the variant's name in results, where others have a policy's
MIN_PROMPT_TOKENS = 32  # an opening alone may have a dozen
# For 1 s after a request vLLM's ranks poll without a pause (0.32: ``SpinCondition``), and another
# server on their cores takes up to three times as long; later they take next to nothing.
_SETTLE_SECONDS = 1.2
OnStep = Callable[[str], None]  # called before every request with a description of it
PromptTokens = Annotated[
    tuple[Annotated[int, Field(ge=MIN_PROMPT_TOKENS)], ...],
    Field(min_length=1, description="prompt lengths"),
    Listed,
    Each,
]


def _different(policies: tuple[Policy, ...]) -> tuple[Policy, ...]:
    if len(set(policies)) < len(policies):
        raise ValueError("each policy can be named once")
    return policies


Policies = Annotated[
    tuple[Annotated[Policy, Shown("NAME")], ...],
    Field(
        min_length=1,
        description="policies to compare; ideal needs a server started with --allow-ideal",
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
    def rounds(self) -> int:
        """Of all lengths, warm-up included; each has a request per variant."""
        return len(self.prompt_tokens) * (self.warmup + self.repeats)


@dataclass(frozen=True)
class Servers:
    """What is measured."""

    balanced: Server
    sidecar: Sidecar  # of the balanced one
    without_ep: ServerWithoutEP | None = None  # beside it: the same model, not expert-parallel

    def variants(self, policies: Sequence[Policy]) -> list[str]:
        """What every round compares, by their names in results."""
        names = [policy.value for policy in policies]
        return names if self.without_ep is None else [*names, WITHOUT_EP]

    def check(self, options: PrefillOptions, sample: str) -> None:
        """Raises ConfigError when a server cannot take the prompts, of which ``sample`` is one."""
        for server in filter(None, (self.balanced, self.without_ep)):
            for tokens in options.prompt_tokens:
                server.check_context(tokens)
            server.check_text(sample)
        if self.without_ep is not None:
            found = (self.balanced.tokens(sample), self.without_ep.tokens(sample))
            if None not in found and found[0] != found[1]:
                raise ConfigError(
                    f"--without-ep serves {self.without_ep.model}, whose tokens are not those of "
                    f"{self.balanced.model}; serve the same model there"
                )

    def ready_for(self, variant: str) -> Server:
        """The server that serves ``variant``, with its policy in force."""
        if variant == WITHOUT_EP:
            assert self.without_ep is not None
            return self.without_ep
        self.sidecar.set_policy(Policy(variant))
        return self.balanced


@dataclass(frozen=True)
class LengthResult:
    """One prompt length: ``samples[variant][i]`` is the time to first token in round i, seconds."""

    requested_tokens: int
    prompt_tokens: int  # median of what the server counted
    samples: Mapping[str, Sequence[float]]  # one per round for every variant
    after_rest: Mapping[str, Sequence[float]]  # of the requests before, which woke a server

    def to_json(self) -> dict[str, Any]:
        """One entry of ``rows`` in the benchmark's JSON; None where a variant was not measured."""
        spreads = {variant: spread_of(samples) for variant, samples in self.samples.items()}
        medians = {name: spread.pop("median") for name, spread in spreads.items()}
        off, quota, ideal, without_ep = map(medians.get, ("off", "quota", "ideal", WITHOUT_EP))
        gap = off - ideal if off is not None and ideal is not None else 0.0
        return {
            "prompt_tokens": self.prompt_tokens,
            "requested_tokens": self.requested_tokens,
            "rounds": min(len(samples) for samples in self.samples.values()),
            "ttft_seconds": medians,
            "ttft_spread": spreads,
            "ttft_samples": {variant: list(each) for variant, each in self.samples.items()},
            "ttft_after_rest": {name: list(each) for name, each in self.after_rest.items()},
            # The part of the best possible speed, and of the possible gain, that was reached.
            "efficiency": ideal / quota if ideal is not None and quota else None,
            "recovered": (off - quota) / gap if off and quota is not None and gap > 0 else None,
            "speedup": off / quota if off is not None and quota else None,
            "quota_over_without_ep": quota / without_ep if quota and without_ep else None,
            "paired": {
                f"{above}_over_{below}": self._paired(above, below)
                for above, below in (("quota", "off"), ("ideal", "quota"), ("quota", WITHOUT_EP))
            },
        }

    def seconds_of(self, policy: Policy) -> list[float]:
        """Times of all requests under ``policy``."""
        name = policy.value
        return [*self.samples.get(name, ()), *self.after_rest.get(name, ())]

    def _paired(self, numerator: str, denominator: str) -> dict[str, Any] | None:
        """The ratios within each round, which a drifting machine disturbs least."""
        if numerator not in self.samples or denominator not in self.samples:
            return None
        pairs = zip(self.samples[numerator], self.samples[denominator], strict=True)
        return ratios_json([above / below for above, below in pairs])


@dataclass(frozen=True)
class PrefillResult:
    """Everything that one run measured."""

    started: str  # UTC, ISO 8601
    lengths: tuple[LengthResult, ...]
    balance: dict[str, Any] | None  # the sidecar's statistics of the quota rounds
    num_ranks: int | None  # as the sidecar says


def measure_prefill(
    servers: Servers,
    source: PromptSource,
    options: PrefillOptions,
    on_step: OnStep = lambda description: None,
) -> PrefillResult:
    """Warm up, measure every length, and leave the policy as it was.

    The sidecar selects batches by wall-clock time, so its clock and this one must agree; on one
    machine they do. Raises ConfigError and BenchError with what to do.
    """
    servers.check(options, source(MIN_PROMPT_TOKENS, options.seed))
    sidecar = servers.sidecar
    run = _PrefillRun(servers, source, options, on_step)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with sidecar.policy_restored():
        for tokens in options.prompt_tokens:
            run.warm_up(tokens)
        since_ns = time.time_ns()
        lengths = tuple(run.measure(tokens) for tokens in options.prompt_tokens)
        measured = Policy.QUOTA if Policy.QUOTA in options.policies else options.policies[0]
        requests = sum(len(length.seconds_of(Policy.QUOTA)) for length in lengths)
        balance = sidecar.balance(since_ns, measured, requests)
    ranks = balance.get("num_ranks")
    return PrefillResult(
        started=started,
        lengths=lengths,
        balance=balance if measured is Policy.QUOTA else None,
        num_ranks=ranks if isinstance(ranks, int) else None,
    )


class Turns:
    """Requests to servers that share cores, one at a time."""

    def __init__(self) -> None:
        self._last: tuple[Server, float] | None = None  # the last request's, and when it ended

    def wake(self, server: Server, prompt: Callable[[], str]) -> FirstToken | None:
        """Where another server was asked last, wait until it is idle, and ask ``server`` something.

        A server that has rested is slow at first, and the variant without expert parallelism shares
        its server with no other. ``prompt`` makes one that is asked nowhere else.
        """
        if self._last is None or self._last[0] is server:
            return None
        unlike = prompt()
        time.sleep(max(0.0, self._last[1] + _SETTLE_SECONDS - time.monotonic()))
        return self.ask(server, unlike)

    def ask(self, server: Server, prompt: str) -> FirstToken:
        """What ``server`` answers."""
        result = server.first_token(prompt)
        self._last = (server, time.monotonic())
        return result


class _PrefillRun:
    """The requests of one benchmark, numbered so that each text and each opening is used once."""

    def __init__(
        self, servers: Servers, source: PromptSource, options: PrefillOptions, on_step: OnStep
    ) -> None:
        self._servers, self._source = servers, source
        self._options, self._on_step = options, on_step
        self._variants = servers.variants(options.policies)
        self._turns = Turns()
        self._after_rest: dict[str, list[float]] = {variant: [] for variant in self._variants}
        self._openings = Openings()
        self._chooser = random.Random(options.seed)
        self._next_seed = options.seed

    def warm_up(self, tokens: int) -> None:
        """Unmeasured requests: connections, compilation and buffers for this length."""
        for i in range(self._options.warmup):
            order = self._variants[:: 1 if i % 2 else -1]  # few changes of the server
            self._round(tokens, order, f"{tokens} tokens, warm-up")

    def measure(self, tokens: int) -> LengthResult:
        """All rounds of one length, in ``balanced_orders`` one after another."""
        orders = balanced_orders(self._variants)
        self._chooser.shuffle(orders)
        self._after_rest = {variant: [] for variant in self._variants}
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
                variant: [each[variant].seconds for each in rounds] for variant in self._variants
            },
            after_rest=self._after_rest,
        )

    def _round(self, tokens: int, order: Sequence[str], description: str) -> dict[str, FirstToken]:
        """One prompt per variant, all made before the first is sent."""
        prompts = self._prompts(tokens, len(order))
        results = {}
        for variant, prompt in zip(order, prompts, strict=True):
            self._on_step(f"{description}, {variant}")
            server = self._servers.ready_for(variant)
            if woken := self._turns.wake(server, lambda: self._prompts(tokens, 1)[0]):
                self._after_rest[variant].append(woken.seconds)
            results[variant] = self._turns.ask(server, prompt)
        return results

    def _prompts(self, tokens: int, number: int) -> list[str]:
        """The same text behind ``number`` openings, each of ``tokens`` tokens."""
        seed, count = self._next_seed, self._servers.balanced.count_tokens
        self._next_seed += MAX_ROUNDS + 1  # fitting draws from the seeds in between
        return [
            fitted_prompt(self._openings, self._source, tokens, seed, count) for _ in range(number)
        ]


def balanced_orders(variants: Sequence[str]) -> list[list[str]]:
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
