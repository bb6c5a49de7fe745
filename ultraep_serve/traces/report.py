"""A replay as JSON, and its plans as ``.npz``."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ultraep_serve.traces.files import whole_file
from ultraep_serve.traces.replay import DumpedPlans, PolicyReplay, Replay, ReplayOptions

__all__ = ["replay_document", "write_document", "write_plans"]


def replay_document(result: Replay, options: ReplayOptions, trace_name: str) -> dict[str, Any]:
    """Statistics over all cases, as JSON; ``floor`` only where there are domains."""
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
            "skipped": options.skip,
        },
        "policies": {name: _policy(result, one) for name, one in result.policies.items()},
    }
    if options.domain_size is not None:
        document["floor"] = _spread(result.floor)
    return document


def _policy(result: Replay, outcome: PolicyReplay) -> dict[str, Any]:
    seconds = np.percentile(outcome.plan_seconds, (50, 99))
    total = sum(result.assignments)
    return {
        "imbalance_before": _spread(result.imbalance_before),
        "imbalance_after": _spread(outcome.imbalance_after),
        "replicas": {
            "mean": float(np.mean(outcome.num_replicas)),
            "max": max(outcome.num_replicas),
        },
        "slots_needed": max(outcome.slots_needed),
        "remote_fraction": sum(outcome.remote) / total if total else 0.0,
        "plan_seconds": {"p50": float(seconds[0]), "p99": float(seconds[1])},
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(values)),
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(max(values)),
    }


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Write JSON, whole or not at all. Raises TraceError."""
    with whole_file(path) as part:
        part.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_plans(path: Path, plans: DumpedPlans) -> None:
    """Write int32 ``loads``, ``slot_expert`` and ``share``, whole or not at all. TraceError."""
    with whole_file(path) as part, part.open("wb") as stream:
        np.savez_compressed(
            stream, loads=plans.loads, slot_expert=plans.slot_expert, share=plans.share
        )
