"""What replays leave: a JSON document of all policies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ultraep_kernels.contract import FULL_SPEED

from ultraep_lab.replay import PolicyReplay, Replay
from ultraep_lab.replay_options import ReplayOptions


def replay_document(result: Replay, options: ReplayOptions, trace_name: str) -> dict[str, Any]:
    """Statistics over all cases, as JSON; ``floor`` only where there are domains.

    Where ranks are not equally fast, what is said of counts is also said of times.
    """
    document: dict[str, Any] = {
        "ep": options.num_ranks,
        "slots": options.num_slots,
        "batch_tokens": options.batch_tokens,
        "batches": len({batch for batch, _ in result.cases}),
        "trace": {
            "file": trace_name,
            "layers": len({layer for _, layer in result.cases}),
            "domain": options.domain_size,
            "history_batches": options.history_batches,
            "rebalance_every": options.rebalance_every,
            "skipped": result.skipped,
        },
        "policies": {name: _policy(result, one) for name, one in result.policies.items()},
        "layers": _layers(result),
    }
    if options.domain_size is not None:
        document["floor"] = _spread(result.floor)
    if _speeds_differ(result):
        document["speeds"] = (result.context.speeds / FULL_SPEED).tolist()
        if options.domain_size is not None:
            document["time_floor"] = _spread(result.time_floor)
    return document


def _speeds_differ(result: Replay) -> bool:
    return bool((result.context.speeds != result.context.speeds[0]).any())


def _policy(result: Replay, found: PolicyReplay) -> dict[str, Any]:
    seconds = np.percentile(found.plan_seconds, (50, 99))
    total = sum(result.assignments)
    times = {}
    if _speeds_differ(result):
        times = {
            "time_imbalance_before": _spread(result.time_imbalance_before),
            "time_imbalance_after": _spread(found.time_imbalance_after),
        }
    return {
        "imbalance_before": _spread(result.imbalance_before),
        "imbalance_after": _spread(found.imbalance_after),
        **times,
        "busiest_expert": _spread(found.busiest_expert),
        "replicas": {
            "mean": float(np.mean(found.num_replicas)),
            "max": max(found.num_replicas),
        },
        "slots_needed": max(found.slots_needed),
        "remote_fraction": sum(found.remote) / total if total else 0.0,
        "plan_seconds": {"p50": float(seconds[0]), "p99": float(seconds[1])},
    }


def _layers(result: Replay) -> list[dict[str, Any]]:
    """Mean imbalance of each layer over all batches, before and after each policy."""
    layer = np.array([layer for _, layer in result.cases])

    def mean(values: Sequence[float], number: int) -> float:
        return float(np.mean(np.asarray(values)[layer == number]))

    return [
        {
            "layer": number,
            "imbalance_before": mean(result.imbalance_before, number),
            "imbalance_after": {
                name: mean(found.imbalance_after, number) for name, found in result.policies.items()
            },
        }
        for number in np.unique(layer).tolist()
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(values)),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(max(values)),
    }
