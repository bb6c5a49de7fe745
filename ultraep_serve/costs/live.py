"""A running server's own figures -> advice, as far as figures without expert loads allow.

The sidecar knows the imbalance of every layer, not the load of every expert, so nothing can be
planned anew: how far another number of slots would get is not known, and is not guessed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ultraep_serve.costs.advice import Setting
from ultraep_serve.costs.decide import Transfer, break_even_tokens, residual_imbalance
from ultraep_serve.costs.memory import slot_memory
from ultraep_serve.costs.predict import Prefill, prefill_seconds
from ultraep_serve.costs.recommend import SCHEMA_VERSION, WORTH_GAIN
from ultraep_serve.errors import ConfigError

__all__ = ["LiveFigures", "live_batch_tokens", "live_document", "live_figures", "weighed"]

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
