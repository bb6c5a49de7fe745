"""What a layer costs on this machine, measured once at start-up and agreed on by all ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.fit import fit
from ultraep_serve.costs.model import CostModel
from ultraep_serve.fabric import HostFabric
from ultraep_serve.policies import plan_quota
from ultraep_serve.slots import LayerSlots
from ultraep_serve.types import ExpertShape

__all__ = ["Probes", "agreed_costs", "host_probes", "probe_loads"]

_ROWS_PER_MASTER = (16, 64, 256)  # assignments; enough for the kernel to run as in a prefill
_REPEATS = 3
_EXCHANGES = 20
_MEASURED = (
    "seconds_per_assignment",
    "base_seconds",
    "link_bytes_per_second",
    "exchange_seconds",
    "plan_seconds",
)


@dataclass(frozen=True)
class Probes:
    """Seconds that a rank's own verbs take, and how ranks tell each other; all ranks call alike."""

    seconds: Callable[[Callable[[], object]], float]  # that something takes
    exchange: Callable[[], float]
    send_expert: Callable[[], float]
    plan: Callable[[], float]
    gather: Callable[[NDArray[np.float64]], NDArray[np.float64]]  # (n,) of a rank -> (R, n)


def agreed_costs(
    config: BalanceConfig,
    shape: ExpertShape,
    layer: LayerSlots,
    probes: Probes,
    run_layer: Callable[[int], None],
) -> CostModel:
    """The configured cost model, or the mean of what the ranks measure; the same on every rank."""
    if config.costs:
        return CostModel.from_json(config.costs)
    own = _measure_costs(shape, layer, probes, run_layer)
    measured = np.array([getattr(own, name) for name in _MEASURED], dtype=np.float64)
    agreed = probes.gather(measured).mean(axis=0)
    return replace(own, **dict(zip(_MEASURED, agreed.tolist(), strict=True)))


def _measure_costs(
    shape: ExpertShape, layer: LayerSlots, probes: Probes, run_layer: Callable[[int], None]
) -> CostModel:
    """Time a layer, an expert's transfer, an exchange and a plan; all ranks together.

    ``run_layer`` computes and combines a batch that gives every rank so many assignments. A share
    of that, the sum over ranks, does not grow with a rank's load; it is taken as if it did.
    """
    sizes = [rows * shape.num_masters for rows in _ROWS_PER_MASTER]
    run_layer(sizes[0])
    samples = [(float(size), probes.seconds(partial(run_layer, size))) for size in sizes]
    line = fit(samples)
    expert_bytes = int(layer.expert_bytes.sum())
    return CostModel(
        seconds_per_assignment=line.slope,
        base_seconds=line.intercept,
        bytes_per_expert=expert_bytes,
        exchange_seconds=probes.exchange(),
        link_bytes_per_second=expert_bytes / probes.send_expert(),
        plan_seconds=probes.plan(),
    )


def probe_loads(shape: ExpertShape) -> NDArray[np.int64]:
    """(R, E) for timing a plan: all that one rank's experts can be asked for."""
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), dtype=np.int64)
    loads[:, : shape.num_masters] = 1 + np.arange(shape.num_masters)
    return loads


def host_probes(shape: ExpertShape, layer: LayerSlots, fabric: HostFabric) -> Probes:
    """Of ranks whose experts live in host memory."""
    loads, domain_size = probe_loads(shape), len(fabric.domain)

    def exchange() -> float:
        row = np.zeros(1, np.int64)
        return _best(lambda: [fabric.exchange(row) for _ in range(_EXCHANGES)]) / _EXCHANGES

    return Probes(
        seconds=_best,
        exchange=exchange,
        send_expert=lambda: _best(lambda: _copy_one_expert(layer, shape)),
        plan=lambda: _best(lambda: plan_quota(loads, shape, 0, domain_size=domain_size)),
        gather=lambda values: fabric.exchange(values.view(np.int64)).view(np.float64),
    )


def _copy_one_expert(layer: LayerSlots, shape: ExpertShape) -> None:
    """Master 0 into slot 0, or onto itself where there are no slots."""
    target = shape.num_masters if shape.num_replica_slots else 0
    for tensor in layer.tensors:
        tensor[target].copy_(tensor[0].clone())


def _best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs: what the machine can do, not what disturbed it."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
