"""BalancedLayers on device backend, between processes."""

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.balancer_rigs import CONFIG, LAYERS, SHAPES, masters_of, search_briefly, skewed
from tests.support.host_driver import HostDriver
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import fresh_run_path, run_ranks
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.backend import DeviceBackend
from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.balance.memory import HandleKind
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common import group
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.proof import start
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

Joined = tuple[CostModel, list[int], list[int]]


def join(rank: int, run_path: Path, view: TokenView, costs: str) -> Joined:
    """Layers joined as an engine does it, on a device.

    What was agreed on, decisions, and this rank's assignments to each rank in a forced layer.
    """
    search_briefly()
    start._LOADS, start._TOKENS = 1, 16  # the interpreter is slow
    shape = ExpertShape(2, 8, 1)
    own = EngineRank("test", rank, engine_group(run_path, rank, 2))
    meet_in(run_path)
    config = CONFIG.replace(costs=costs)
    driver = HostDriver()
    layers = [
        [torch.nn.Parameter(tensor, requires_grad=False) for tensor in masters_of(rank, i, 4)]
        for i in range(LAYERS)
    ]
    sizes = []

    def run_layer(num_assignments: int) -> None:
        sizes.append(num_assignments)
        time.sleep(num_assignments * 2e-6)

    made: list[DeviceBackend] = []
    waited: set[int] = set()
    gather = DeviceFabric.gather

    def noted(fabric: DeviceFabric, *arguments: Any) -> torch.Tensor:
        waited.add(fabric.patience_ns)
        return gather(fabric, *arguments)

    def make_backend(_device: torch.device, setup: GroupSetup) -> DeviceBackend:
        made.append(DeviceBackend(setup, driver))
        return made[0]

    with mock.patch.object(DeviceFabric, "gather", noted):
        described = MovableLayers(layers, shape, view, run_layer)
        with mock.patch.object(group, "make_backend", make_backend):
            joined = BalancedLayers(config, own, described)
        backend = made[0]
        assert all(parameter.shape[0] == 5 for layer in layers for parameter in layer)
        assert bool(sizes) != bool(costs)
        assert min(sizes, default=4096) >= 1024 * 4  # rows of an expert, masters
        assert 0 < backend.slot_bytes < driver.live_bytes
        joined.mark_ready(logging.getLogger("test"))
        for batch in range(2):
            for layer in range(LAYERS):
                ids = skewed(rank if view is TokenView.OWN else 0)
                physical = joined.balancer.route(layer, ids, 100)
                joined.balancer.receive()
                assert torch.equal(physical < 0, ids < 0)
                joined.balancer.computed()
            loading = {600_000_000_000}  # while the engine compiles
            assert waited == ({60_000_000_000} if batch else loading)
            waited.clear()
            joined.end_loading(logging.getLogger("test"))
        if rank == 0:
            with ControlPage.open(run_path) as page:
                page.set_policy(Policy.IDEAL)
        ids[1, 0] = -1  # an odd number, so that the next rank's turns begin elsewhere
        for layer in range(LAYERS):
            physical = joined.balancer.route(layer, ids, 100)
            joined.balancer.receive()
            joined.balancer.computed()
        assert torch.equal(physical < 0, ids < 0)
    ring = RingReader(RunFiles(run_path).ring(rank))
    assert ring.header().state is RingState.READY
    decisions = ring.poll().records["decision"].tolist()
    backend.fabric.exchange(torch.zeros(backend.fabric.limits.row_width, dtype=torch.int32))
    forced = torch.bincount(physical[physical >= 0] // shape.num_local, minlength=2)
    return joined._costs, decisions, forced.tolist()


def test_balanced_layers_run_on_a_device() -> None:
    given = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9)
    for view in TokenView:
        with fresh_run_path() as run_path:
            both = run_ranks(join, 2, run_path, view, given.to_json(), timeout_seconds=400.0)
        decisions = [Decision.PLANNED] * LAYERS * 2 + [Decision.FORCED] * LAYERS
        assert [found[:2] for found in both] == [(given, decisions)] * 2
        forced = torch.tensor([found[2] for found in both])
        whole = forced[0] if view is TokenView.SHARED else forced.sum(0)
        assert whole.max() - whole.min() <= 1


def test_ranks_agree_on_the_costs_they_measure() -> None:
    with fresh_run_path() as run_path:
        both = run_ranks(join, 2, run_path, TokenView.SHARED, "", timeout_seconds=400.0)
    (costs, decisions, _), other = both
    assert (costs, decisions) == other[:2]  # whatever it is
    assert costs.bytes_per_expert == sum(4 * torch.Size(shape).numel() for shape in SHAPES)
    assert 1e-6 < costs.seconds_per_assignment < 3e-6
    assert min(costs.link_bytes_per_second, costs.exchange_seconds, costs.plan_seconds) > 0


def join_rack(rank: int, run_path: Path) -> tuple[int, int]:
    """Layers of 8 ranks on two hosts that share memory; slots filled here, and by relays."""
    search_briefly()
    shape, host = ExpertShape(8, 16, 2), run_path / f"host-{rank // 4}"
    host.mkdir(exist_ok=True)
    cheap = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e12)
    meet_in(host)
    config = CONFIG.replace(costs=cheap.to_json(), domain_size=8, self_check="off")
    layers = [
        [torch.nn.Parameter(tensor, requires_grad=False) for tensor in masters_of(rank, i, 2)]
        for i in range(LAYERS)
    ]
    made: list[DeviceBackend] = []

    def make_backend(_device: torch.device, setup: GroupSetup) -> DeviceBackend:
        assert setup.location.spans_hosts
        made.append(DeviceBackend(setup, HostDriver(HandleKind.FABRIC)))
        return made[0]

    own = EngineRank("test", rank, engine_group(run_path, rank, 8))
    with mock.patch.object(group, "make_backend", make_backend):
        described = MovableLayers(layers, shape, TokenView.SHARED, lambda _: None)
        joined = BalancedLayers(config, own, described)
    ids = torch.arange(640) % 16
    ids[: len(ids) * 2 // 3] = 5  # of rank 2, wanted on both hosts
    filled = relayed = 0
    for layer in range(LAYERS):
        joined.balancer.route(layer, ids.view(-1, 2).int(), 320)
        joined.balancer.receive()
        found = joined.balancer._parts[0].plan.found
        relayed += int((found.sends.parents[rank] >= 0).sum())
        for slot, expert in enumerate(found.slot_expert[rank].tolist()):
            if expert >= 0:
                filled += 1
                owner, local = divmod(expert, 2)
                for tensor, theirs in zip(layers[layer], masters_of(owner, layer, 2), strict=True):
                    assert torch.equal(tensor[2 + slot], theirs[local])
        joined.balancer.computed()
    made[0].fabric.exchange(torch.zeros(made[0].fabric.limits.row_width, dtype=torch.int32))
    return filled, relayed


def test_a_domain_of_two_hosts_copies_and_relays_between_them() -> None:
    with fresh_run_path() as run_path:
        found = run_ranks(join_rack, 8, run_path, timeout_seconds=400.0)
    filled, relayed = zip(*found, strict=True)
    assert all(sum(of_host) > 0 for of_host in (filled[:4], filled[4:], relayed[4:]))
