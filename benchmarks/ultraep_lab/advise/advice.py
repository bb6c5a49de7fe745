"""A trace and a machine -> what each policy would gain there, by the cost model.

Loads are planned for real, with the planner that serves; only times are predicted.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.advise.predict import (
    NOTHING_MOVED,
    Prefill,
    break_even_tokens,
    layer_seconds,
    prefill_seconds,
    residual_imbalance,
)
from ultraep_lab.comparators import PolicyFunction, policy_function
from ultraep_lab.comparators.eplb_slots import HISTORY_BATCHES
from ultraep_lab.comparators.placement import Placement
from ultraep_lab.store import load_trace
from ultraep_lab.trace import PREFILL, LoadTrace, Trace, of_phase
from ultraep_serve.costs.hardware import Estimate
from ultraep_serve.costs.model import Transfer, saved_picoseconds, transfer_of
from ultraep_serve.costs.shapes import ModelShape
from ultraep_serve.errors import ConfigError
from ultraep_serve.plan.checks import imbalance_floor
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import ExpertShape, IntArray, imbalance

__all__ = [
    "FROM_PAST",
    "NEEDS_NO_SLOTS",
    "Advice",
    "Forecast",
    "Setting",
    "advise",
    "prefill_trace",
]

WITHIN_BATCH = ("quota", "llep", "exact")  # weights move in the batch that needs them
FROM_PAST = ("eplb", "eplb-slots", "lplb")  # weights moved between batches
NEEDS_NO_SLOTS = ("off", "ideal", "llep", "exact")  # the number of slots does not matter to them
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """Where the trace would be served. Raises ConfigError where ranks do not fit the model."""

    shape: ModelShape
    estimate: Estimate
    num_ranks: int
    weight_type: str
    domain_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ConfigError(f"--ep = {self.num_ranks} must be 1 or more")
        if self.shape.num_experts % self.num_ranks:
            raise ConfigError(
                f"{self.shape.num_experts} experts of {self.shape.name} cannot be divided by "
                f"{self.num_ranks} ranks; choose another --ep"
            )

    def context(self, slots: int) -> PlanContext:
        """What plans with ``slots`` per rank depend on; all ranks are equally fast."""
        shape = ExpertShape(self.num_ranks, self.shape.num_experts, slots)
        return PlanContext.of(shape, self.domain_size)

    def tokens(self, loads: Counts) -> float:
        """Tokens over all ranks of a layer with ``loads`` (R, E)."""
        return float(loads.sum()) / self.shape.experts_per_token


@dataclass
class Forecast:
    """One policy with one number of slots; the lists have one entry per batch."""

    policy: str
    slots: int
    imbalance: list[float] = field(default_factory=list)  # as served, mean over layers
    planned: list[float] = field(default_factory=list)  # if every plan were followed
    seconds: list[float] = field(default_factory=list)  # predicted, whole prefill
    moved_layers: int = 0  # where experts were copied
    layers: int = 0
    slots_needed: int = 0
    links: list[int] = field(default_factory=list)  # experts on the busiest link of each plan

    @property
    def mean_imbalance(self) -> float:
        """As served, over layers and batches."""
        return float(np.mean(self.imbalance))

    @property
    def planned_imbalance(self) -> float:
        """Over layers and batches, if every plan were followed, whether it pays or not."""
        return float(np.mean(self.planned))

    @property
    def transfer(self) -> Transfer:
        """What a plan moves, on average, rounded up."""
        moved = int(np.ceil(np.mean(self.links))) if self.links else 0
        return Transfer(moved, moved)

    def memory_bytes(self, setting: Setting) -> int:
        """Replica memory per rank: a pool for all layers, or redundant experts in every one."""
        slots = max(self.slots, self.slots_needed)
        pools = setting.shape.num_moe_layers if self.policy in FROM_PAST else 1
        return pools * slots * setting.shape.expert_bytes(setting.weight_type)


@dataclass(frozen=True)
class Advice:
    """What was found for one trace."""

    setting: Setting
    batch_tokens: float  # mean, over all ranks
    floor: float  # mean over layers and batches: the best that domains allow
    skipped_first: bool  # the first batch was history only
    off: Forecast
    forecasts: list[Forecast]  # without off

    def gain(self, forecast: Forecast) -> float:
        """Prefill throughput over that without balancing."""
        return sum(self.off.seconds) / sum(forecast.seconds)

    def break_even(self, forecast: Forecast) -> int | None:
        """Tokens per batch from which on moving weights saves time; None: never, or none move."""
        if not forecast.transfer.busiest_link:
            return None
        return break_even_tokens(
            self.setting.estimate.costs,
            self.setting.context(forecast.slots).shape,
            self.setting.shape.experts_per_token,
            self.off.mean_imbalance,
            forecast.planned_imbalance,
            forecast.transfer,
        )

    def gain_at(self, forecast: Forecast, tokens: float) -> float:
        """Gain of moving weights in every layer of a batch of ``tokens``, at mean imbalances."""
        shape, ranks, estimate = self.setting.shape, self.setting.num_ranks, self.setting.estimate
        filled = min(forecast.transfer.busiest_link, forecast.slots)
        off = Prefill(tokens, ranks, self.off.mean_imbalance)
        on = Prefill(tokens, ranks, forecast.planned_imbalance, filled, forecast.transfer, True)
        return prefill_seconds(shape, estimate, off) / prefill_seconds(shape, estimate, on)


def advise(
    setting: Setting,
    batches: Iterable[IntArray],
    slots: Sequence[int],
    policies: Sequence[str],
    limit: int,
) -> Advice:
    """Plan every layer of the first ``limit`` batches, loads int32 (layers, R, E), and add up.

    The first batch is history only, unless it is the only one: there are no past loads yet.

    Raises:
        ConfigError: there is no batch.
        UnsupportedError: a policy needs a package that is not installed.
    """
    forecasters = [_Forecaster(setting, name, number) for name, number in _cases(slots, policies)]
    past: deque[Counts] = deque(maxlen=HISTORY_BATCHES)
    tokens: list[float] = []
    floors: list[float] = []
    chosen = list(islice(batches, limit + 1))
    skipped = len(chosen) > 1
    for index, loads in enumerate(chosen[: limit + skipped]):
        counts = loads.astype(np.int64)
        if index >= skipped:
            known = np.stack(past, 1) if past else np.zeros((len(counts), 0, *loads.shape[1:]), int)
            for forecaster in forecasters:
                forecaster.add(counts, known)
            tokens.append(setting.tokens(counts[0]))
            floors += [imbalance_floor(layer, setting.context(0)) for layer in counts]
        past.append(counts)
    if not tokens:
        raise ConfigError("the trace has no whole batch; choose a smaller --batch-tokens")
    off, *forecasts = (each.forecast for each in forecasters)
    return Advice(setting, float(np.mean(tokens)), float(np.mean(floors)), skipped, off, forecasts)


def _cases(slots: Sequence[int], policies: Sequence[str]) -> list[tuple[str, int]]:
    """Policies and slots, first of all ``off``; the slots of a policy that needs none are 0."""
    cases = [("off", 0)]
    for policy in policies:
        cases += [(policy, number) for number in ((0,) if policy in NEEDS_NO_SLOTS else slots)]
    return list(dict.fromkeys(cases))


class _Forecaster:
    """Adds up one forecast, batch by batch."""

    def __init__(self, setting: Setting, policy: str, slots: int) -> None:
        self._setting, self._context = setting, setting.context(slots)
        self._policy: PolicyFunction = policy_function(policy)
        self.forecast = Forecast(policy, slots)

    def add(self, loads: Counts, history: Counts) -> None:
        """One batch: ``loads`` (layers, R, E), ``history`` (layers, N, R, E)."""
        setting, forecast = self._setting, self.forecast
        results = []
        for layer, past in zip(loads, history, strict=True):
            results.append(self._layer(layer, self._policy.place(layer, self._context, past)))
        seconds, after, planned = np.mean(results, axis=0).tolist()
        dense = setting.shape.num_dense_layers * setting.estimate.dense_seconds_per_token
        whole = seconds * setting.shape.num_moe_layers
        forecast.seconds.append(whole + dense * setting.tokens(loads[0]) / setting.num_ranks)
        forecast.imbalance.append(after)
        forecast.planned.append(planned)

    def _layer(self, loads: Counts, placement: Placement) -> tuple[float, float, float]:
        """Seconds and imbalance of one layer as served, and imbalance as planned."""
        setting, forecast, masters = self._setting, self.forecast, self._context.shape.num_masters
        is_within_batch = forecast.policy in WITHIN_BATCH
        before = self._context.rank_loads(loads)
        after = placement.quota.sum(0, dtype=np.int64)
        planned = imbalance(after)
        transfer = NOTHING_MOVED
        if is_within_batch and placement.slot_expert is not None:
            transfer = transfer_of(placement.slot_expert, masters)
        if transfer.busiest_link:
            forecast.links.append(transfer.busiest_link)
        if forecast.policy == "quota" and not self._pays(before, after, transfer):
            after, transfer = before, NOTHING_MOVED
        forecast.layers += 1
        if transfer.busiest_link:
            forecast.moved_layers += 1
            forecast.slots_needed = max(forecast.slots_needed, transfer.busiest_receiver)
        redundant = forecast.slots if forecast.policy in FROM_PAST else 0
        seconds = layer_seconds(
            setting.estimate.costs,
            float(after.max()),
            setting.tokens(loads) / setting.num_ranks,
            masters + redundant + transfer.busiest_receiver,
            transfer=transfer,
            exchanged=is_within_batch and forecast.slots + transfer.busiest_link > 0,
        )
        return seconds, imbalance(after), planned

    def _pays(self, before: Counts, after: Counts, transfer: Transfer) -> bool:
        """The decision a server would take: no plan below the residual, no plan that costs time."""
        costs = self._setting.estimate.costs
        if imbalance(before) <= residual_imbalance(costs, float(before.mean())):
            return False
        most, least = int(before.max()), int(after.max())
        return (
            saved_picoseconds(most, least, self._context.shape, transfer, costs.integer_costs()) > 0
        )


def prefill_trace(path: Path, shape: ModelShape) -> Trace | LoadTrace:
    """A trace of this model; decode is left out where the trace marks it.

    Raises:
        TraceError: the file cannot be read, or has no prefill.
        ConfigError: it is of a model with other experts, experts per token or layers.
    """
    trace = load_trace(path)
    _check_fits(trace, shape)
    if isinstance(trace, Trace):
        trace = replace(trace, num_experts=shape.num_experts)
    return of_phase(trace, PREFILL)


def _check_fits(trace: Trace | LoadTrace, shape: ModelShape) -> None:
    is_stated = isinstance(trace, LoadTrace) or "num_experts" in trace.metadata
    experts = trace.num_experts  # if not stated, the model's highest may never have been chosen
    if experts != shape.num_experts and (is_stated or experts > shape.num_experts):
        raise _misfit(shape, experts, "experts", shape.num_experts)
    if isinstance(trace, Trace) and (top_k := trace.topk_ids.shape[2]) != shape.experts_per_token:
        raise _misfit(shape, top_k, "experts per token", shape.experts_per_token)
    if not 1 <= trace.num_layers <= shape.num_moe_layers:
        raise _misfit(shape, trace.num_layers, "MoE layers", shape.num_moe_layers)


def _misfit(shape: ModelShape, found: int, what: str, expected: int) -> ConfigError:
    return ConfigError(
        f"the trace has {found} {what}, {shape.name} has {expected}; give the configuration of "
        "the traced model with --model-config"
    )
