"""The whole data flow of one rank, launched and replayed, with all its peers' rows there.

One rank whose peers have posted already. Its row has ``experts_sent`` by it in each batch, and
``stage_microseconds`` by CUDA events of a batch that the host launched (between two stages lies
what the host takes to launch). Checked are the ids of replays with the policy on, off and on again,
and the record of the launched batch.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench import PATIENCE_NS, Bench
from numpy.typing import NDArray
from report import Report, require_equal
from routes import Routes, make_routes
from ultraep_kernels.contract import HEADER_WIDTH
from ultraep_kernels.host.reroute import reroute as reroute_on_cpu

from tests.support.mirror import mirrored_fabric
from ultraep_serve.backend import GroupSetup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.cuda.balancer import DeviceBalancer
from ultraep_serve.cuda.fabric import DeviceFabric, Limits
from ultraep_serve.cuda.slots import DeviceSlotPool
from ultraep_serve.planner.quota import plan_quota
from ultraep_serve.topology import Location
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage, TokenView

IMBALANCE = 2.0


@dataclass(frozen=True)
class Sizes:
    """What is balanced."""

    shape: ExpertShape
    tokens: int  # of one rank
    top_k: int
    tensor_bytes: tuple[int, ...]  # of one expert
    chunk_bytes: int


FP8_EXPERT = (4096 * 4096, 4096 * 2048, 8192, 4096)  # weights and block scales
FULL = Sizes(ExpertShape(64, 256, 2), 8192, 8, FP8_EXPERT, 1 << 20)
TINY = Sizes(ExpertShape(4, 16, 2), 50, 2, (80, 37), 64)


@dataclass
class Notes:
    """Recorder and policy source in one."""

    policy: Policy = Policy.QUOTA
    max_imbalance_millionths: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def record(self, **values: Any) -> None:
        """As ``Recorder.record``."""
        self.records.append(values)

    def count_batch(self, decision: Decision) -> None:
        """Batches are not looked at."""


def run(bench: Bench, report: Report) -> None:
    """Rank 0."""
    sizes = TINY if bench.dry_run else FULL
    routes = make_routes(sizes.shape, sizes.tokens, sizes.top_k, IMBALANCE, bench.device)
    report.run("balancer", check_balancer, bench, sizes, routes)


def check_balancer(bench: Bench, sizes: Sizes, routes: Routes) -> dict[str, Any]:
    """Replays that obey the policy, and a batch that the host launched."""
    shape, loads, ids = sizes.shape, routes.loads, routes.ids[0]
    notes, balancer, fabric = balancer_of_rank_0(bench, sizes, loads)
    expected = plan_quota(loads, shape, 0)
    masters = shape.num_masters
    twin = reroute_on_cpu(ids.cpu(), expected.share, expected.slot_expert, masters)
    identity = balancer.identity(ids).cpu()
    replay = bench.capture(lambda: balancer.route(0, ids, sizes.tokens))
    for policy, physical in ((Policy.QUOTA, twin), (Policy.OFF, identity), (Policy.QUOTA, twin)):
        notes.policy = policy
        balancer.route(0, ids[:0], 0)  # where the host reads the policy; launches nothing
        require_equal(replay(), physical, f"replay with policy {policy.value}")
    notes.records.clear()
    require_equal(balancer.route(0, ids, sizes.tokens), twin, "launched batch")
    balancer.computed()
    fabric.require_peers()  # waits, so that the record is there
    balancer.computed()
    record = notes.records[-1]
    require_equal(torch.from_numpy(record["slot_expert"]), expected.slot_expert, "record")
    require_equal(torch.from_numpy(record["load_after"]), expected.quota.sum(0), "record")
    _, microseconds = bench.replayed(lambda: balancer.route(0, ids, sizes.tokens))
    fabric.require_peers()
    stages = {stage.name.lower(): record["stage_ns"][stage] / 1e3 for stage in Stage}
    return {
        "checked": "plan_quota and reroute on CPU",
        **routes.figures(),
        "graph_microseconds": microseconds,
        "experts_sent": record["bytes_sent"] // sum(sizes.tensor_bytes),
        "stage_microseconds": None if bench.dry_run else stages,
    }


def balancer_of_rank_0(
    bench: Bench, sizes: Sizes, loads: NDArray[np.int64]
) -> tuple[Notes, DeviceBalancer, DeviceFabric]:
    """Of a group that has ``loads`` (R, E), rank 0's own among them."""
    shape, driver = sizes.shape, bench.driver()
    pool = DeviceSlotPool(driver, shape.num_replica_slots, sizes.chunk_bytes)
    layer = pool.adopt(
        [
            torch.ones((shape.num_masters, size), dtype=torch.uint8, device=driver.device)
            for size in sizes.tensor_bytes
        ]
    )
    rows = torch.zeros((shape.num_ranks, HEADER_WIDTH + loads.shape[1]), dtype=torch.int32)
    rows[:, HEADER_WIDTH:] = torch.from_numpy(loads)
    programs = max(1, bench.num_programs // 2)
    limits = Limits(rows.shape[1], layer.chunks.shape[0], PATIENCE_NS, programs)
    fabric = mirrored_fabric(driver, pool, rows.to(driver.device), limits)
    notes, config = Notes(), BalanceConfig(min_batch_tokens=1, max_imbalance=1.0)
    location = Location.on_one_host(0, shape.num_ranks)
    setup = GroupSetup(config, shape, TokenView.OWN, location)
    return notes, DeviceBalancer(setup, [layer], fabric, notes, notes), fabric
