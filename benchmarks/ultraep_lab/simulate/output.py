"""What a simulation leaves: a JSON document of distributions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_lab.simulate.simulation import Fleet, Simulation
from ultraep_serve.system.machine import describe

__all__ = ["PERCENTILES", "simulation_document"]

SCHEMA_VERSION = 1
PERCENTILES = {"p1": 1, "p50": 50, "p99": 99, "worst": 100}


def simulation_document(
    fleet: Fleet, traffic: dict[str, Any], simulations: Sequence[Simulation]
) -> dict[str, Any]:
    """Distributions over planned layers, by variant; times of plans apart, with the machine.

    All but ``plan_seconds`` is the same in every run. What is said of counts is also said of times
    where ranks are not equally fast.
    """
    setting = simulations[0].variant.setting
    return {
        "schema_version": SCHEMA_VERSION,
        "model": setting.shape.name,
        "experts": setting.shape.num_experts,
        "experts_per_token": setting.shape.experts_per_token,
        "weights": setting.weight_type,
        "fleet": fleet.model_dump(),
        "traffic": traffic,
        "variants": [_variant(fleet, simulation) for simulation in simulations],
        "assumptions": list(
            dict.fromkeys(
                line for one in simulations for line in one.variant.setting.estimate.assumptions
            )
        ),
        "plan_seconds": {
            "machine": describe(),
            "variants": [_spread(one.column("plan_seconds")) for one in simulations],
        },
    }


def _variant(fleet: Fleet, simulation: Simulation) -> dict[str, Any]:
    variant, column = simulation.variant, simulation.column
    num_ranks, planned = variant.setting.num_ranks, len(simulation.figures)
    names = ("before", "floor", "after", *(("planned",) if fleet.dead_links else ()))
    document: dict[str, Any] = {
        "name": variant.name,
        "made_up_imbalances": list(simulation.traffic.imbalances),
        "ep": num_ranks,
        "domain": variant.context.domain_size,
        "slots": variant.slots,
        "relay": variant.relay,
        "groups": simulation.groups,
        "ranks": simulation.groups * num_ranks,
        "layers": simulation.layers,
        "planned_layers": planned,
        "imbalance": {name: _spread(column(name)) for name in names},
    }
    if fleet.slow_ranks:
        document["time_imbalance"] = {name: _spread(column(f"time_{name}")) for name in names}
    document |= {
        "copies": _spread(column("copies")),
        "busiest_link_bytes": _spread(column("link_bytes")),
        "layer_seconds": {
            "off": _spread(column("off_seconds")),
            "balanced": _spread(column("seconds")),
        },
        "predicted_gain": float(column("off_seconds").sum() / column("seconds").sum()),
        "followed": float(column("is_followed").mean()),
    }
    if fleet.dead_links:
        copies = float(column("copies").sum())
        document["lost_copies"] = float(column("lost_copies").sum()) / max(1.0, copies)
        document["returned"] = _spread(column("returned"))
    return document


def _spread(values: NDArray[np.float64]) -> dict[str, float]:
    found = np.percentile(values, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, found.tolist(), strict=True))
