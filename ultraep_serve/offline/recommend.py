"""Advice in words and as JSON: what to do, why, and what had to be assumed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_serve.costs.model import Transfer
from ultraep_serve.errors import ConfigError
from ultraep_serve.offline.advice import FROM_PAST, HISTORY_BATCHES, Advice, Outcome, Setting
from ultraep_serve.offline.predict import (
    Prefill,
    break_even_tokens,
    prefill_seconds,
    residual_imbalance,
    slot_memory,
)

__all__ = [
    "SCHEMA_VERSION",
    "WORTH_GAIN",
    "LiveFigures",
    "Verdict",
    "advice_document",
    "live_batch_tokens",
    "live_document",
    "live_figures",
    "named_slots",
    "recommend",
    "weighed",
]

SCHEMA_VERSION = 1
WORTH_GAIN = 1.02  # below it a prediction is not better than its own errors
SAME_GAIN = 0.005  # fewer slots are preferred where they gain as much, give or take this
MIB = 1 << 20

Verdict = dict[str, Any]


def advice_document(advice: Advice, source: str, hardware: str) -> dict[str, Any]:
    """Everything as JSON. Times in seconds, memory in bytes per rank, gains as ratios to off."""
    setting = advice.setting
    costs = setting.estimate.costs
    mean_load = advice.batch_tokens * setting.shape.experts_per_token / setting.num_ranks
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "hardware": hardware,
        "model": setting.shape.name,
        "weights": setting.weight_type,
        "ep": setting.num_ranks,
        "domain": setting.domain_size,
        "batch_tokens": advice.batch_tokens,
        "batches": len(advice.off.seconds),
        "first_batch_is_history": advice.skipped_first,
        "imbalance_now": {
            "mean": advice.off.mean_imbalance,
            "max": max(advice.off.imbalance),
            "floor": advice.floor,
            "left_alone_below": residual_imbalance(costs, mean_load),
        },
        "prefill_seconds_now": sum(advice.off.seconds) / len(advice.off.seconds),
        "costs": asdict(costs),
        "assumptions": [*setting.estimate.assumptions, *_flattery(advice)],
        "outcomes": [_outcome(advice, outcome) for outcome in advice.outcomes],
        "recommendation": recommend(advice),
    }


def recommend(advice: Advice) -> Verdict:
    """``balance`` true or false, with slots and flags where true, and the reasons in words."""
    served = [outcome for outcome in advice.outcomes if outcome.policy == "quota" and outcome.slots]
    if not served:
        return {"balance": None, "reasons": ["policy quota with a slot was not compared"]}
    best = max(advice.gain(outcome) for outcome in served)
    chosen = _fewest_slots(advice, served)
    if best < WORTH_GAIN:
        return {"balance": False, "reasons": _against(advice, served, best)}
    return _for(advice, chosen)


def _for(advice: Advice, chosen: Outcome) -> Verdict:
    gain, break_even = advice.gain(chosen), advice.break_even(chosen)
    memory = chosen.memory_bytes(advice.setting)
    reasons = [
        f"predicted prefill throughput {gain:.2f}x: imbalance {advice.off.mean_imbalance:.2f} -> "
        f"{chosen.mean_imbalance:.2f} with {named_slots(chosen.slots)} per rank",
        f"costs {memory / MIB:.0f} MiB per rank, once for all layers",
    ]
    if break_even is not None:
        reasons.append(f"batches below about {break_even} tokens (all ranks) are better left alone")
    reasons += [
        f"past-window {other.policy} with {named_slots(other.slots)} would reach "
        f"{advice.gain(other):.2f}x and imbalance {other.mean_imbalance:.2f}, for "
        f"{other.memory_bytes(advice.setting) / MIB:.0f} MiB per rank"
        for other in advice.outcomes
        if other.policy in FROM_PAST and other.slots == chosen.slots
    ]
    return {
        "balance": True,
        "policy": "quota",
        "slots": chosen.slots,
        "min_batch_tokens": break_even,
        "predicted_gain": gain,
        "reasons": [*reasons, *_floor(advice)],
    }


def _against(advice: Advice, served: list[Outcome], best: float) -> list[str]:
    """Why to leave it off: the first thing that would have to change."""
    now = advice.off.mean_imbalance
    reasons = [f"the best predicted prefill throughput is {best:.2f}x, not worth its while"]
    perfect = min(advice.off.planned_imbalance, advice.floor)
    limits = [tokens for outcome in served if (tokens := advice.break_even(outcome)) is not None]
    if now / max(perfect, 1.0) < 1.05:
        reasons.append(f"the ranks are balanced already: imbalance {now:.2f}")
    elif limits and min(limits) > advice.batch_tokens:
        reasons.append(
            f"batches of {advice.batch_tokens:.0f} tokens are too small: moving weights pays from "
            f"about {min(limits)} tokens on"
        )
    elif not limits:
        reasons.append("no batch is large enough: plans gain too little, or no slot was allowed")
    else:
        reasons.append("experts take too small a share of the prefill time")
    past = [outcome for outcome in advice.outcomes if outcome.policy in FROM_PAST]
    if past and max(map(advice.gain, past)) >= WORTH_GAIN:
        better = _fewest_slots(advice, past)
        reasons.append(
            f"past-window {better.policy} with {named_slots(better.slots)} is predicted to reach "
            f"{advice.gain(better):.2f}x, as long as traffic stays what it is"
        )
    return [*reasons, *_floor(advice)]


def _fewest_slots(advice: Advice, outcomes: list[Outcome]) -> Outcome:
    """Of those that gain about as much as the best, the one with the fewest slots."""
    best = max(advice.gain(outcome) for outcome in outcomes)
    good = [outcome for outcome in outcomes if advice.gain(outcome) >= best - SAME_GAIN]
    return min(good, key=lambda outcome: outcome.slots)


def _flattery(advice: Advice) -> list[str]:
    names = sorted({outcome.policy for outcome in advice.outcomes if outcome.policy in FROM_PAST})
    if not names:
        return []
    return [
        f"{' and '.join(names)} look back {HISTORY_BATCHES} batches before every batch and move "
        "weights for nothing, which flatters them: deployed, they do so every thousand steps"
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


def _outcome(advice: Advice, outcome: Outcome) -> dict[str, Any]:
    slots = max(outcome.slots, outcome.slots_needed)
    return {
        "policy": outcome.policy,
        "slots": outcome.slots,
        "slots_needed": slots,
        "imbalance": outcome.mean_imbalance,
        "imbalance_if_always_moved": outcome.planned_imbalance,
        "imbalance_by_batch": outcome.imbalance,
        "predicted_gain": advice.gain(outcome),
        "moved_share": outcome.moved_layers / outcome.layers,
        "busiest_link_experts": outcome.transfer.busiest_link,
        "break_even_tokens": advice.break_even(outcome),
        "memory_bytes": outcome.memory_bytes(advice.setting),
    }


WRONG_ADDRESS = "give the sidecar's address, not the engine's"
REACHED = 1.02  # assumed after balancing where no balanced batch was seen


@dataclass(frozen=True)
class LiveFigures:
    """What ``/v1/balance`` says; imbalance as max/mean over ranks."""

    num_ranks: int
    before: float  # by routing alone
    after: float | None  # as served, where balancing is on


def live_figures(balance: Mapping[str, Any]) -> LiveFigures:
    """The figures in ``balance``, the answer of ``/v1/balance``.

    Raises ConfigError: the answer has no imbalance, or is no such answer.
    """
    try:
        ranks = int(balance["num_ranks"])
        before = balance["imbalance"]["before"]["mean"]
        after = balance["imbalance"]["after"]["mean"]
        policy = balance["policy"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"/v1/balance has no {error}; {WRONG_ADDRESS}") from error
    if before is None:
        raise ConfigError(
            "the server has weighed no batch yet: send it prompts of usual length under policy "
            "quota, or record a trace and use --trace"
        )
    known = policy == "quota" and after is not None
    return LiveFigures(ranks, float(before), float(after) if known else None)


def weighed(balance: Mapping[str, Any]) -> bool:
    """Whether ``/v1/balance`` has an imbalance; raises ConfigError where it is no such answer."""
    try:
        return balance["imbalance"]["before"]["mean"] is not None
    except (KeyError, TypeError) as error:
        raise ConfigError(f"/v1/balance has no {error}; {WRONG_ADDRESS}") from error


def live_batch_tokens(recent: Mapping[str, Any]) -> float:
    """The usual batch, in tokens over all ranks, from ``/v1/balance/batches``.

    Raises ConfigError where no batch is known.
    """
    tokens = [batch["tokens"] for batch in recent.get("batches", []) if batch.get("tokens")]
    if not tokens:
        raise ConfigError("the server tells no batch sizes yet; give --batch-tokens")
    return float(np.median(tokens))


def live_document(
    setting: Setting,
    balance: Mapping[str, Any],
    batch_tokens: float,
    slots: int,
    source: str,
    hardware: str,
) -> dict[str, Any]:
    """Advice as JSON, from the imbalance that a server measured in batches of ``batch_tokens``."""
    figures = live_figures(balance)
    before, measured = figures.before, figures.after
    after = min(before, REACHED if measured is None else measured)
    costs, shape = setting.estimate.costs, setting.shape
    transfer = Transfer(slots, slots)
    off = prefill_seconds(shape, setting.estimate, Prefill(batch_tokens, setting.num_ranks, before))
    on = prefill_seconds(
        shape,
        setting.estimate,
        Prefill(batch_tokens, setting.num_ranks, after, slots, transfer, True),
    )
    break_even = break_even_tokens(
        costs, setting.experts(slots), shape.experts_per_token, before, after, transfer
    )
    mean_load = batch_tokens * shape.experts_per_token / setting.num_ranks
    gain = off / on
    return {
        "schema_version": SCHEMA_VERSION,
        "source": source,
        "hardware": hardware,
        "model": shape.name,
        "weights": setting.weight_type,
        "ep": setting.num_ranks,
        "batch_tokens": batch_tokens,
        "imbalance_now": {
            "mean": before,
            "max": balance["imbalance"]["before"].get("max"),
            "left_alone_below": residual_imbalance(costs, mean_load),
        },
        "imbalance_after": after,
        "imbalance_after_is_measured": measured is not None,
        "prefill_seconds_now": off,
        "costs": asdict(costs),
        "assumptions": [
            *setting.estimate.assumptions,
            "a server tells the imbalance of layers, not the load of experts: other numbers of "
            "slots and other policies cannot be predicted from it; use a trace for that",
            f"the busiest link carries {slots} experts per layer, one per slot",
            *([] if measured is not None else [f"balancing would leave an imbalance of {REACHED}"]),
        ],
        "layers": [
            {"layer": layer["layer"], "imbalance": layer["imbalance"]["before"]["mean"]}
            for layer in balance.get("layers", [])
        ],
        "recommendation": _verdict(setting, gain, slots, break_even, batch_tokens, before, after),
    }


def _verdict(
    setting: Setting,
    gain: float,
    slots: int,
    break_even: int | None,
    batch_tokens: float,
    before: float,
    after: float,
) -> dict[str, Any]:
    reasons = [
        f"predicted prefill throughput {gain:.2f}x at imbalance {before:.2f} -> {after:.2f} in "
        f"batches of {batch_tokens:.0f} tokens"
    ]
    if gain < WORTH_GAIN:
        if break_even is None or before < 1.05:
            reasons.append("the ranks are balanced already, or no batch is large enough")
        elif break_even > batch_tokens:
            reasons.append(f"moving weights pays from about {break_even} tokens on")
        return {"balance": False, "reasons": reasons}
    memory = slot_memory(setting.shape, slots, setting.weight_type)
    reasons.append(f"costs {memory.shared / (1 << 20):.0f} MiB per rank, once for all layers")
    return {
        "balance": True,
        "policy": "quota",
        "slots": slots,
        "min_batch_tokens": break_even,
        "predicted_gain": gain,
        "reasons": reasons,
    }
