"""The whole data flow of one rank, launched and replayed, with all its peers' rows there.

One rank whose peers have posted already. Checked are the ids of replays with the policy on, off and
on again, and the record of a batch that the host launched; ``experts_sent`` are this rank's, and
``stage_microseconds`` by CUDA events (between two stages lies what the host takes to launch).
``graph_microseconds`` are those of the layer behind a batch's first, from its route to its experts,
``host_microseconds`` what the host takes to route it while the device is idle. The second row is a
layer that is left alone, as it was in the batch before.
"""

import statistics
import time
from typing import Any

import torch
from report import Report
from routes import Routes, make_routes
from stages import IMBALANCE, BatchSizes
from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.device.stream import Programs
from ultraep_kernels.host.reroute import reroute

from tests.support.bench import PATIENCE_NS, Bench
from tests.support.kernel_checks import require_equal
from tests.support.mirror import FakeRecorder, bare_config, mirrored_balancer
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.cuda.pages import TIMED_EVERY
from ultraep_serve.balance.physical import master_ids
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.system.topology import Location
from ultraep_serve.types import Decision, Policy, Stage, TokenView

LAYERS = 2
LEFT_ALONE_TARGET = 12.0  # microseconds
HOST_TARGET, HOST_LEFT_ALONE_TARGET = 60.0, 30.0
HOST_REPETITIONS = 50


def run(bench: Bench, report: Report) -> None:
    """Rank 0."""
    sizes = BatchSizes.on(bench)
    routes = make_routes(sizes.shape, sizes.tokens, sizes.top_k, IMBALANCE, bench.device)
    report.run("balancer", check_balancer, bench, sizes, routes)
    report.run("layer that is left alone", check_left_alone, bench, sizes, routes)


def check_balancer(bench: Bench, sizes: BatchSizes, routes: Routes) -> dict[str, Any]:
    """Replays that obey the policy, and a batch that the host launched."""
    shape, ids, recorder = sizes.shape, routes.ids[0], FakeRecorder()
    balancer, fabric = balancer_of_rank_0(bench, sizes, routes, recorder)
    expected = plan_quota(routes.loads, PlanContext.of(shape), 0)
    twin = reroute(ids.cpu(), expected.share, expected.slot_expert, shape.num_masters)
    identity = master_ids(ids, balancer._identity).cpu()
    replay = bench.capture(lambda: launch(balancer, 0, ids))
    for policy, physical in ((Policy.QUOTA, twin), (Policy.OFF, identity), (Policy.QUOTA, twin)):
        recorder.policy = policy
        launch(balancer, 0, ids[:0])  # where the host reads the policy; launches nothing
        require_equal(replay(), physical, f"replay with policy {policy.value}")
    for layer in [*range(LAYERS), *range(LAYERS)]:  # a batch goes by the one before last
        run_layer(balancer, layer, ids)
    fabric.require_peers()
    recorder.events.clear()
    for _ in range(TIMED_EVERY):  # among which there is one whose stages are timed
        for layer in range(LAYERS):
            require_equal(run_layer(balancer, layer, ids), twin, "launched batch")
        fabric.require_peers()  # waits, so that the record is there
    balancer.computed()
    record, stage_ns = recorder.events[-1], recorder.stage_ns
    require_equal(torch.tensor(record["slot_expert"]), expected.slot_expert, "recorded slots")
    require_equal(torch.tensor(record["load_after"]), expected.quota.sum(0), "recorded loads")
    times = layer_times(bench, balancer, ids, None, HOST_TARGET)
    fabric.require_peers()
    stages = {stage.name.lower(): stage_ns[stage] / 1e3 for stage in Stage}
    return {
        "checked": "plan_quota and reroute on CPU",
        **routes.figures(),
        **times,
        "experts_sent": record["bytes_sent"] // sum(sizes.tensor_bytes),
        "stage_microseconds": None if bench.interpreted else stages,
    }


def check_left_alone(bench: Bench, sizes: BatchSizes, routes: Routes) -> dict[str, Any]:
    """A layer whose threshold no batch reaches."""
    ids, recorder = routes.ids[0], FakeRecorder()
    balancer, fabric = balancer_of_rank_0(bench, sizes, routes, recorder, max_imbalance=1000.0)
    identity = master_ids(ids, balancer._identity).cpu()
    for _ in range(2):
        for layer in range(LAYERS):
            require_equal(run_layer(balancer, layer, ids), identity, "launched layer")
    decisions = {event["decision"] for event in recorder.events}
    assert decisions == {Decision.BALANCED}, decisions
    times = layer_times(bench, balancer, ids, LEFT_ALONE_TARGET, HOST_LEFT_ALONE_TARGET)
    fabric.require_peers()
    return {"checked": "the identity", **routes.figures(), **times}


def launch(balancer: DeviceBalancer, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """All that a layer has launched before its experts; its physical ids."""
    physical = balancer.route(layer, ids, len(ids))
    balancer.receive()
    return physical


def run_layer(balancer: DeviceBalancer, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """One whose experts are none; its physical ids."""
    physical = launch(balancer, layer, ids)
    balancer.computed()
    return physical


def layer_times(
    bench: Bench,
    balancer: DeviceBalancer,
    ids: torch.Tensor,
    at_most: float | None,
    host_at_most: float,
) -> dict[str, Any]:
    """Of the layer behind a batch's first: the device's time, and the host's."""
    bench.capture(lambda: launch(balancer, 0, ids))  # so that the layer goes into a graph as well
    _, microseconds = bench.replayed(lambda: launch(balancer, LAYERS - 1, ids))
    took = []
    for _ in range(1 if bench.interpreted else HOST_REPETITIONS):
        run_layer(balancer, 0, ids)
        balancer._fabric.require_peers()  # waits
        began = time.perf_counter()
        balancer.route(LAYERS - 1, ids, len(ids))
        took.append(1e6 * (time.perf_counter() - began))
        balancer.receive()
        balancer.computed()
    host = None if bench.interpreted else statistics.median(took)
    met = [
        found <= limit
        for found, limit in ((microseconds, at_most), (host, host_at_most))
        if found is not None and limit is not None
    ]
    return {
        "graph_microseconds": microseconds,
        "at_most": at_most,
        "host_microseconds": host,
        "host_at_most": host_at_most,
        "met": all(met) if met else None,
    }


def balancer_of_rank_0(
    bench: Bench,
    sizes: BatchSizes,
    routes: Routes,
    recorder: FakeRecorder,
    max_imbalance: float = 1.0,
) -> tuple[DeviceBalancer, DeviceFabric]:
    """Of a group whose loads are those of ``routes``."""
    shape, driver, loads = sizes.shape, bench.driver(), torch.from_numpy(routes.loads)
    masters = [
        torch.ones((shape.num_masters, size), dtype=torch.uint8, device=driver.device)
        for size in sizes.tensor_bytes
    ]
    rows = torch.zeros((shape.num_ranks, HEADER_WIDTH + loads.shape[1]), dtype=torch.int32)
    rows[:, HEADER_WIDTH:] = loads
    config, location = bare_config(1, max_imbalance), Location.on_one_host(0, shape.num_ranks)
    setup = GroupSetup(config, shape, TokenView.OWN, location, chunk_bytes=sizes.chunk_bytes)
    programs = Programs(bench.num_programs, 0)
    layers = [masters, [torch.ones_like(tensor) for tensor in masters]]
    return mirrored_balancer(driver, setup, layers, rows, recorder, PATIENCE_NS, programs)
