"""Latency against request rate: the same traffic for every contender, in alternating windows.

A window is one contender at one rate: requests arrive open loop, at times that do not depend on
the answers. In one repeat all windows have the same prompt lengths, texts and order of arrival;
a higher rate only lets them follow closer. So contenders, and rates, differ by nothing else, and
repeats show how much traffic and machine vary. Each prompt has an opening that none before it had.
Where there are several texts, every window goes from one to the next, in equal parts.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

from pydantic import Field, model_validator

from ultraep_lab.bench.aiperf import AIPerf, Request, WindowFigures
from ultraep_lab.bench.engine import Server
from ultraep_lab.bench.prefill import (
    MIN_PROMPT_TOKENS,
    Servers,
    balanced_orders,
)
from ultraep_lab.bench.prompts import MAX_ROUNDS, Openings, PromptSource, fitted_prompt
from ultraep_serve.errors import BenchError
from ultraep_serve.system.settings import Listed, Seconds, Settings
from ultraep_serve.types import Policy

__all__ = ["LoadOptions", "LoadRun", "LoadWindow", "Schedule", "measure_load", "traffic"]

Rate = Annotated[float, Field(gt=0)]
ReadyFor = Callable[[str], Server]  # the server of a contender, ready to serve as that


class LoadOptions(Settings):
    """What to measure."""

    rates: Annotated[tuple[Rate, ...], Listed] = Field(
        default=(1.0, 2.0, 4.0, 8.0), min_length=1, description="requests per second, growing"
    )
    requests: int = Field(default=120, ge=2, description="requests per window")
    repeats: int = Field(default=3, ge=1, description="windows per policy and rate")
    prompt_median: int = Field(
        default=1024, ge=MIN_PROMPT_TOKENS, description="tokens; prompt lengths are lognormal"
    )
    prompt_p90: int = Field(
        default=2048, ge=1, description="tokens; nine of ten prompts are not longer"
    )
    output_tokens: int = Field(default=64, ge=2, description="tokens of every answer")
    warmup: int = Field(default=4, ge=0, description="requests per policy that are not measured")
    seed: int = Field(default=0, ge=0, description="seed of lengths, texts and arrivals")
    burstiness: float = Field(
        default=1.0,
        ge=0.01,  # below it fewer than one request in a hundred stands alone
        description="of arrivals: 1 is Poisson, below it they come in bursts (shape of a gamma "
        "distribution)",
    )
    ttft_objective: Seconds = Field(
        default=1.0, description="time to first token within which a request counts as good"
    )

    @model_validator(mode="after")
    def _in_order(self) -> "LoadOptions":
        if list(self.rates) != sorted(set(self.rates)):
            raise ValueError("--rates must grow")
        if self.prompt_p90 < self.prompt_median:
            raise ValueError("--prompt-p90 must be --prompt-median or more")
        return self

    @property
    def sweep_seconds(self) -> float:
        """How long one contender's requests take to arrive, at all rates, once."""
        return sum(self.requests / rate for rate in self.rates)


@dataclass(frozen=True)
class Schedule:
    """One repeat's requests, in order of arrival, for every contender and rate."""

    arrivals: tuple[float, ...]  # as parts of the window, the first at 0
    prompt_tokens: tuple[int, ...]
    first_seed: int  # of the first text; others follow in steps of MAX_ROUNDS + 1


def traffic(options: LoadOptions, repeat: int, most_tokens: int | None) -> Schedule:
    """Arrivals of a known number in a window, and lognormal prompt lengths up to ``most_tokens``.

    Gaps are gamma distributed with ``burstiness`` as shape, and scaled so that they fill the
    window: the rate is exactly what was asked for. With shape 1 these are a Poisson process's
    arrivals, given their number.
    """
    chooser = random.Random(f"{options.seed} {repeat}")
    width = log(options.prompt_p90 / options.prompt_median) / NormalDist().inv_cdf(0.9)
    drawn = [
        chooser.lognormvariate(log(options.prompt_median), width) for _ in range(options.requests)
    ]
    most = max(drawn) if most_tokens is None else most_tokens
    gaps = [chooser.gammavariate(options.burstiness, 1.0) for _ in range(options.requests)]
    arrivals = (0.0, *accumulate(gaps[1:]))
    return Schedule(
        arrivals=tuple(arrival / sum(gaps) for arrival in arrivals),
        prompt_tokens=tuple(round(max(MIN_PROMPT_TOKENS, min(most, length))) for length in drawn),
        first_seed=options.seed + repeat * options.requests * (MAX_ROUNDS + 1),
    )


@dataclass(frozen=True)
class LoadWindow:
    """One contender at one rate, once."""

    contender: str  # a policy's name, or another server's
    rate: float  # requests per second, as scheduled
    repeat: int
    figures: WindowFigures


@dataclass
class LoadRun:
    """The windows of one benchmark; what was measured stays when a later one fails."""

    aiperf: AIPerf
    sources: Sequence[PromptSource]  # in the order of every window
    options: LoadOptions
    timeout_seconds: float = 600.0  # for one answer
    raw: Path | None = None  # where AIPerf's own files go, a folder per window
    on_step: Callable[[str, float], None] = lambda description, seconds: None  # before a window
    on_window: Callable[[LoadWindow], None] = lambda window: None  # after it
    windows: list[LoadWindow] = field(default_factory=list)
    _openings: Openings = field(default_factory=Openings)

    def check(self, server: Server) -> None:
        """Raises ConfigError when ``server`` cannot take such prompts."""
        server.check_context(self.options.prompt_median + self.options.output_tokens)
        for source in self.sources:
            server.check_text(source(MIN_PROMPT_TOKENS, self.options.seed))

    def warm_up(self, ready_for: ReadyFor, contenders: Sequence[str]) -> None:
        """Unmeasured requests: connections, compilation, buffers."""
        drawn = traffic(self.options, 0, self._most_tokens(ready_for(contenders[0])))
        for contender in contenders:
            server = ready_for(contender)
            for place in range(min(self.options.warmup, self.options.requests)):
                server.first_token(self._prompt(server, drawn, place))

    def measure(self, ready_for: ReadyFor, contenders: Sequence[str], repeat: int) -> None:
        """All windows of a repeat: rate by rate, contenders in an order that changes.

        Raises BenchError at the first window in which a request failed.
        """
        orders = balanced_orders(contenders)
        for index, rate in enumerate(self.options.rates):
            place = repeat * len(self.options.rates) + index
            for contender in orders[place % len(orders)]:
                seconds = self.options.requests / rate
                self.on_step(f"repeat {repeat + 1}, {rate:g}/s, {contender}", seconds)
                window = self._window(ready_for(contender), contender, rate, repeat)
                self.windows.append(window)
                self.on_window(window)

    def _window(self, server: Server, contender: str, rate: float, repeat: int) -> LoadWindow:
        drawn = traffic(self.options, repeat, self._most_tokens(server))
        seconds = self.options.requests / rate
        requests = [
            Request(
                arrival * seconds, self._prompt(server, drawn, place), self.options.output_tokens
            )
            for place, arrival in enumerate(drawn.arrivals)
        ]
        name = f"{contender}-{rate:g}-{repeat + 1}"
        try:
            figures = self.aiperf.measure(
                server.url,
                server.model,
                requests,
                self.options.ttft_objective,
                self.timeout_seconds,
                self.raw / name if self.raw else None,
            )
        except BenchError as error:
            server.call("GET", "/v1/models")  # a lost server says so itself
            raise BenchError(
                f"{contender} at {rate:g} requests/s: {error}; read the server's log, or leave "
                "out rates that it cannot serve"
            ) from error
        return LoadWindow(contender, rate, repeat, figures)

    def _most_tokens(self, server: Server) -> int | None:
        """The longest prompt that leaves room for the answer."""
        if server.context_tokens is None:
            return None
        return server.context_tokens - self.options.output_tokens

    def _prompt(self, server: Server, drawn: Schedule, place: int) -> str:
        seed = drawn.first_seed + place * (MAX_ROUNDS + 1)
        tokens = drawn.prompt_tokens[place]
        source = self.sources[place * len(self.sources) // self.options.requests]
        return fitted_prompt(self._openings, source, tokens, seed, server.count_tokens)


def measure_load(run: LoadRun, servers: Servers, policies: Sequence[Policy]) -> None:
    """All repeats under ``policies`` in one running server; leaves the policy as it was.

    Raises ConfigError and BenchError with what to do; ``run`` then has what was measured before.
    """
    names = servers.variants(policies)
    run.check(servers.balanced)
    with servers.sidecar.policy_restored():
        run.warm_up(servers.ready_for, names)
        for repeat in range(run.options.repeats):
            run.measure(servers.ready_for, names, repeat)
