"""Advice in words and as JSON: what to do, why, and what had to be assumed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_lab.advise.advice import FROM_PAST, Advice, Forecast, Setting
from ultraep_lab.advise.predict import (
    Prefill,
    break_even_tokens,
    prefill_seconds,
    residual_imbalance,
)
from ultraep_lab.comparators.eplb_slots import HISTORY_BATCHES
from ultraep_serve.costs.model import Transfer
from ultraep_serve.errors import ConfigError

__all__ = [
    "LiveFigures",
    "advice_document",
    "live_batch_tokens",
    "live_document",
    "live_figures",
    "named_slots",
    "recommend",
]

SCHEMA_VERSION = 1
LEAST_GAIN = 1.02  # a smaller one is within the error of a prediction
SAME_GAIN = 0.005  # fewer slots are preferred where they gain as much, give or take this
BALANCED = 1.05  # an imbalance this close to the best possible leaves nothing to gain
REACHED = 1.02  # imbalance assumed after balancing where no balanced batch was seen
MIB = 1 << 20
ONE_BATCH = (
    "one batch stands for all traffic, and policies that go by past loads have at most one to go "
    "by: record more"
)
LEAST_REACHED = 0.1  # of a predicted gain over 1: see ``gain_band``


@dataclass(frozen=True)
class _Prediction:
    """What policy quota with ``slots`` per rank would do; imbalances as max/mean over ranks."""

    slots: int
    gain: float
    before: float
    after: float
    best: float  # the lowest imbalance that any plan can reach
    batch_tokens: float
    break_even: int | None  # tokens per batch from which on moving weights saves time


def recommend(advice: Advice) -> dict[str, Any]:
    """``balance`` true or false, with slots and flags where true, and the reasons in words."""
    served = [
        forecast for forecast in advice.forecasts if forecast.policy == "quota" and forecast.slots
    ]
    if not served:
        return {"balance": None, "reasons": ["policy quota with a slot was not compared"]}
    chosen = _fewest_slots(advice, served)
    limits = [tokens for forecast in served if (tokens := advice.break_even(forecast)) is not None]
    gains = advice.gain(chosen) >= LEAST_GAIN
    prediction = _Prediction(
        chosen.slots,
        advice.gain(chosen),
        advice.off.mean_imbalance,
        chosen.mean_imbalance,
        max(1.0, min(advice.off.planned_imbalance, advice.floor)),
        advice.batch_tokens,
        advice.break_even(chosen) if gains else min(limits, default=None),
    )
    more = [*_from_past(advice), *_floor(advice)]
    return _verdict(advice.setting, prediction, more)


def _verdict(setting: Setting, found: _Prediction, more: list[str]) -> dict[str, Any]:
    reasons = [
        f"predicted prefill throughput {found.gain:.2f}x in batches of {found.batch_tokens:.0f} "
        f"tokens: imbalance {found.before:.2f} -> {found.after:.2f} with "
        f"{named_slots(found.slots)} per rank"
    ]
    least, most = gain_band(found.gain)
    reasons.append(
        f"expect {least:.2f}x to {most:.2f}x: others measured 11 to 70 % of a predicted gain over 1"
    )
    band = {"predicted_gain": found.gain, "predicted_gain_band": [least, most]}
    if found.gain < LEAST_GAIN:
        return {"balance": False, **band, "reasons": [*reasons, _why_not(found), *more]}
    memory = found.slots * setting.shape.expert_bytes(setting.weight_type)
    reasons.append(f"costs {memory / MIB:.0f} MiB per rank, once for all layers")
    if found.break_even is not None:
        reasons.append(f"leave batches below about {found.break_even} tokens (all ranks) alone")
    return {
        "balance": True,
        "policy": "quota",
        "slots": found.slots,
        "min_batch_tokens": found.break_even,
        **band,
        "reasons": [*reasons, *more],
    }


def gain_band(gain: float) -> tuple[float, float]:
    """From the least to the most that a predicted ``gain`` may turn out to be.

    From the imbalances of the method's paper more is predicted than its authors measured: the four
    gains over no balancing reached 11 to 70 % of what was predicted over 1
    (benchmarks/results/paper-projection.json).
    """
    reached = 1 + LEAST_REACHED * (gain - 1)
    return min(reached, gain), max(reached, gain)


def _why_not(found: _Prediction) -> str:
    """The main reason against balancing."""
    if found.before / found.best < BALANCED:
        return f"the ranks are balanced already: imbalance {found.before:.2f}"
    if found.break_even is None:
        return "no batch is large enough: plans gain too little, or no slot was allowed"
    if found.break_even > found.batch_tokens:
        return (
            f"batches of {found.batch_tokens:.0f} tokens are too small: moving weights pays from "
            f"about {found.break_even} tokens on"
        )
    return "experts take too small a share of the prefill time"


def _fewest_slots(advice: Advice, forecasts: list[Forecast]) -> Forecast:
    """Of those that gain about as much as the best, the one with the fewest slots."""
    best = max(advice.gain(forecast) for forecast in forecasts)
    good = [forecast for forecast in forecasts if advice.gain(forecast) >= best - SAME_GAIN]
    return min(good, key=lambda forecast: forecast.slots)


def _from_past(advice: Advice) -> list[str]:
    """What the best policy that goes by past loads would gain, where it gains anything."""
    past = [forecast for forecast in advice.forecasts if forecast.policy in FROM_PAST]
    past = [forecast for forecast in past if advice.gain(forecast) >= LEAST_GAIN]
    if not past:
        return []
    best = _fewest_slots(advice, past)
    return [
        f"{best.policy}, which goes by past loads, is predicted to reach {advice.gain(best):.2f}x "
        f"and imbalance {best.mean_imbalance:.2f} with {named_slots(best.slots)}, for "
        f"{best.memory_bytes(advice.setting) / MIB:.0f} MiB per rank, while traffic does not change"
    ]


def _floor(advice: Advice) -> list[str]:
    if advice.floor <= 1.01:
        return []
    return [
        f"weights stay inside domains of {advice.setting.domain_size} ranks, so no plan can be "
        f"better than {advice.floor:.2f}"
    ]


def named_slots(number: int) -> str:
    """A number of slots in words."""
    return f"{number} slot" + ("" if number == 1 else "s")


def advice_document(advice: Advice, source: str, hardware: str) -> dict[str, Any]:
    """Everything as JSON. Times in seconds, memory in bytes per rank, gains as ratios to off."""
    off = advice.off
    now = {"mean": off.mean_imbalance, "max": max(off.imbalance), "floor": advice.floor}
    seconds = sum(off.seconds) / len(off.seconds)
    names = sorted(
        {forecast.policy for forecast in advice.forecasts if forecast.policy in FROM_PAST}
    )
    optimism = [
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} planned anew before every "
        f"batch from the {HISTORY_BATCHES} before it, and moving weights costs nothing, which is "
        "optimistic: deployments do so every thousand steps"
    ]
    return {
        **_head(advice.setting, source, hardware, advice.batch_tokens, now, seconds),
        "batches": len(off.seconds),
        "first_batch_is_history": advice.skipped_first,
        "assumptions": [
            *advice.setting.estimate.assumptions,
            *(optimism if names else []),
            *([ONE_BATCH] if len(off.seconds) == 1 else []),
        ],
        "outcomes": [_forecast(advice, forecast) for forecast in advice.forecasts],
        "recommendation": recommend(advice),
    }


def _head(
    setting: Setting,
    source: str,
    hardware: str,
    batch_tokens: float,
    now: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """What every advice begins with; ``now`` is the imbalance without balancing."""
    costs = setting.estimate.costs
    mean_load = batch_tokens * setting.shape.experts_per_token / setting.num_ranks
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "hardware": hardware,
        "model": setting.shape.name,
        "weights": setting.weight_type,
        "ep": setting.num_ranks,
        "domain": setting.domain_size,
        "batch_tokens": batch_tokens,
        "imbalance_now": {**now, "left_alone_below": residual_imbalance(costs, mean_load)},
        "prefill_seconds_now": seconds,
        "costs": asdict(costs),
    }


def _forecast(advice: Advice, forecast: Forecast) -> dict[str, Any]:
    return {
        "policy": forecast.policy,
        "slots": forecast.slots,
        "slots_needed": max(forecast.slots, forecast.slots_needed),
        "imbalance": forecast.mean_imbalance,
        "imbalance_if_always_moved": forecast.planned_imbalance,
        "imbalance_by_batch": forecast.imbalance,
        "predicted_gain": advice.gain(forecast),
        "predicted_gain_band": list(gain_band(advice.gain(forecast))),
        "moved_share": forecast.moved_layers / forecast.layers,
        "busiest_link_experts": forecast.transfer.busiest_link,
        "break_even_tokens": advice.break_even(forecast),
        "memory_bytes": forecast.memory_bytes(advice.setting),
    }


@dataclass(frozen=True)
class LiveFigures:
    """What ``/v1/balance`` says; imbalance as max/mean over ranks."""

    num_ranks: int
    before: float  # by routing alone
    worst_before: float | None
    after: float | None  # as served, where balancing is on
    layers: list[dict[str, Any]]  # layer and its imbalance by routing alone


def live_figures(balance: Mapping[str, Any]) -> LiveFigures | None:
    """The figures in ``balance``, the answer of ``/v1/balance``; None: no batch was measured yet.

    Raises ConfigError where it is no such answer.
    """
    try:
        before, after = balance["imbalance"]["before"], balance["imbalance"]["after"]["mean"]
        if before["mean"] is None:
            return None
        balanced = balance["policy"] == "quota" and after is not None
        return LiveFigures(
            num_ranks=int(balance["num_ranks"]),
            before=float(before["mean"]),
            worst_before=before.get("max"),
            after=float(after) if balanced else None,
            layers=[
                {"layer": layer["layer"], "imbalance": layer["imbalance"]["before"]["mean"]}
                for layer in balance.get("layers", [])
            ],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"/v1/balance has no {error}; give the sidecar's address, not the engine's"
        ) from error


def live_batch_tokens(recent: Mapping[str, Any]) -> float:
    """The usual batch, in tokens over all ranks, from ``/v1/balance/batches``.

    Raises ConfigError where no batch is known.
    """
    tokens = [batch["tokens"] for batch in recent.get("batches", []) if batch.get("tokens")]
    if not tokens:
        raise ConfigError("the server knows no batch sizes yet; give --batch-tokens")
    return float(np.median(tokens))


def live_document(
    setting: Setting,
    figures: LiveFigures,
    batch_tokens: float,
    slots: int,
    source: str,
    hardware: str,
) -> dict[str, Any]:
    """Advice as JSON, from the imbalance that a server measured in batches of ``batch_tokens``."""
    before, shape, estimate = figures.before, setting.shape, setting.estimate
    after = min(before, REACHED if figures.after is None else figures.after)
    transfer = Transfer(slots, slots)
    off = Prefill(batch_tokens, setting.num_ranks, before)
    on = Prefill(batch_tokens, setting.num_ranks, after, slots, transfer, exchanged=True)
    now = prefill_seconds(shape, estimate, off)
    gain = now / prefill_seconds(shape, estimate, on)
    break_even = break_even_tokens(
        estimate.costs,
        setting.context(slots).shape,
        shape.experts_per_token,
        before,
        after,
        transfer,
    )
    assumptions = [
        *estimate.assumptions,
        "a server knows the imbalance of layers, not the load of experts: other numbers of slots "
        "and other policies cannot be predicted from it; use a trace for that",
        f"the busiest link carries {slots} experts per layer, one per slot",
    ]
    if figures.after is None:
        assumptions.append(f"balancing would leave an imbalance of {REACHED}")
    prediction = _Prediction(slots, gain, before, after, 1.0, batch_tokens, break_even)
    imbalance = {"mean": before, "max": figures.worst_before}
    return {
        **_head(setting, source, hardware, batch_tokens, imbalance, now),
        "imbalance_after": after,
        "imbalance_after_is_measured": figures.after is not None,
        "assumptions": assumptions,
        "layers": figures.layers,
        "recommendation": _verdict(setting, prediction, []),
    }
