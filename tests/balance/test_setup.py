"""BalancedLayers on host memory, without an engine; on a device it is in tests/cuda."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.hosts import engine_group, host_path, meet_in
from tests.support.ranks import run_ranks
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.collectives import all_gather_rows
from ultraep_serve.balance.host.backend import HostBackend
from ultraep_serve.balance.slots import LayerSlots
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common import group as joining
from ultraep_serve.engines.common import memory
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.errors import ConfigError, FabricError, PeerTimeoutError, UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.sidecar.window import StageWindow
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

SHAPE = ExpertShape(2, 8, 1)
GIVEN = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9)


@pytest.mark.parametrize(
    ("max_imbalance", "speeds", "slots", "domain", "largest", "says"),
    [
        (1.9, "equal", 1, 2, None, ""),
        (1.9, "equal", 1, 2, 100, ""),
        (1.9, "equal", 1, 2, 1, "in the largest batch, of 1 assignments"),
        (1.9, "equal", 1, 1, None, "every domain has one rank"),
        (1.9, "equal", 0, 2, None, "choose --slots 1 or more"),
        (2.0, "equal", 1, 2, None, "no load is more uneven than 2,"),
        (2.0, "1,0.5", 1, 2, None, ""),
        (3.0, "1,0.5", 1, 2, None, "no load is more uneven than 3,"),
        (3.0, "auto", 1, 2, None, ""),
    ],
)
def test_what_leaves_every_load_at_home_is_named(
    max_imbalance: float, speeds: str, slots: int, domain: int, largest: int | None, says: str
) -> None:
    config = BalanceConfig(max_imbalance=max_imbalance, speeds=speeds)
    shape, location = ExpertShape(2, 8, slots), Location(0, 2, 2, domain)
    setup = GroupSetup(config, shape, TokenView.OWN, location)
    said = setup.why_never_balanced(GIVEN, largest)
    assert says in said
    assert bool(says) == bool(said)


@pytest.mark.parametrize(
    ("view", "cache", "most"),
    # A token's row, what comes of it and their sum in float32 take 2048 * 8 bytes, and the rows
    # that are computed at once up to 1 GiB.
    [
        (TokenView.SHARED, 1 << 30, 65536),
        (TokenView.OWN, 1 << 30, 32768),  # a rank may get rows of both ranks' tokens
        (TokenView.SHARED, (3 << 30) - (9 << 20), 64),
        (TokenView.SHARED, 5 << 30, 0),
    ],
)
def test_a_batch_that_memory_does_not_hold_is_refused_with_one_that_it_does(
    monkeypatch: pytest.MonkeyPatch, view: TokenView, cache: int, most: int
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 6 << 30)  # of two ranks
    setup = GroupSetup(BalanceConfig(), SHAPE, view, Location(0, 2, 2, 2))
    answers = Answers(lambda *_: torch.empty(0), 8, 2048, torch.bfloat16, torch.device("cpu"), 0)
    sources = 2 if view is TokenView.OWN else 1
    fits = f"{most} or less" if most else "less by far, or a smaller cache"
    for tokens in (100_000 * sources, most + 1):
        with pytest.raises(ConfigError, match=rf"--chunked-prefill-size\) {fits}"):
            memory.require_memory(setup, answers, 8 * tokens * sources, cache)
    if most:
        memory.require_memory(setup, answers, 8 * most * sources, cache)


@pytest.mark.parametrize(("wanted", "memory_bytes", "chosen"), [
    ("auto", 68_267, "per_layer"), ("auto", 68_266, "shared"), ("shared", 1 << 40, "shared"),
    ("per_layer", 0, "per_layer"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layers_get_slots_of_their_own_where_there_is_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, device: str, wanted: str, memory_bytes: int, chosen: str
) -> None:
    """At most 6 % of a GPU's memory, or of a rank's part of the host's."""
    monkeypatch.setattr(memory, "total_memory", lambda: 2 * memory_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, memory_bytes))
    config = BalanceConfig(slot_memory=wanted)
    setup = GroupSetup(config, SHAPE, TokenView.OWN, Location(0, 2, 2, 2))
    size, kind = torch.Size([SHAPE.num_masters, 512]), torch.device(device)
    master = mock.Mock(device=kind, nbytes=4 * size.numel())  # a slot of two has 4096 bytes
    assert memory.chosen_slot_memory(setup, [[master, master]]) == chosen
    if wanted == "auto":
        two = replace(setup, shape=replace(SHAPE, num_micro_batches=2))
        assert memory.chosen_slot_memory(two, [[master, master]]) == "shared"  # twice the slots


@pytest.mark.parametrize(("chosen", "largest", "tokens"), [
    (0, None, 1334), (0, 8192, 1024), (0, 64, 256), (7, None, 7),
])  # fmt: skip
def test_batches_that_cannot_pay_are_small(chosen: int, largest: int | None, tokens: int) -> None:
    """1 us an assignment and 1.6 ms of exchange and plan, two ranks, eight experts of a token."""
    config = BalanceConfig(min_batch_tokens=chosen)
    setup = GroupSetup(config, SHAPE, TokenView.OWN, Location(0, 2, 2, 2))
    costs = CostModel(1e-6, 1, 1e9, exchange_seconds=1e-4, plan_seconds=1.5e-3)
    layers = mock.Mock(largest_batch=largest, experts_per_token=8)
    group = mock.Mock(_setup=setup, _costs=costs, _layers=layers)
    found = BalancedLayers._with_smallest_batch(group)
    assert found.config.min_batch_tokens == tokens


def join_hosts(rank: int, run_path: Path, view: TokenView, costs: str) -> list[int]:
    """Decisions of three batches on four ranks, two on each host; masters hold their rank + 1."""
    shape, location = ExpertShape(4, 8, 1), Location(rank, 4, 2, 2)
    home, group = host_path(run_path, location), engine_group(run_path, rank, 4)
    meet_in(home)
    config = BalanceConfig(min_batch_tokens=8, costs=costs)
    layer = [torch.nn.Parameter(torch.full((2, size), 1.0 + rank), False) for size in (300, 7)]
    layers = MovableLayers([layer], shape, view, lambda size: time.sleep(size * 1e-4))
    joined = BalancedLayers(config, EngineRank("test", rank, group), layers)
    joined.mark_ready(logging.getLogger("test"))
    assert joined._setup.location.domain == location.domain
    assert not costs or RunFiles(home).costs() == GIVEN
    assert all((tensor.shape[0], tensor[:2].unique()) == (3, rank + 1) for tensor in layer)
    ids = torch.tensor([[0, 4]], dtype=torch.int32).repeat(64, 1)  # of ranks 0 and 2
    with ControlPage.open(home) as page:
        for changer in (None, 2, 0):  # the page of the second host does not count
            if rank == changer:
                page.set_policy(Policy.OFF)
            all_gather_rows(group.on_host, np.zeros(1, np.int64), 30.0)
            physical = joined.balancer.route(0, ids, 64)
            joined.balancer.receive()
            if changer == 0 or view is TokenView.SHARED:  # else tokens stay at home where they can
                used = (physical // shape.num_local).unique().tolist()
                assert used == ([0, 2] if changer == 0 else [0, 1, 2, 3])
            if rank % 2:
                assert all((tensor[2] == rank).all() for tensor in layer)  # the neighbour's expert
            joined.balancer.computed()
            all_gather_rows(group.on_host, np.zeros(1, np.int64), 30.0)
    ring = RingReader(RunFiles(home).ring(rank))
    header = ring.header()
    assert (header.location.host, header.location.domain_size) == (location.host, 2)
    assert header.location.first_host
    assert (header.policy, header.state) == (Policy.OFF, RingState.READY)
    records = ring.poll().records
    is_own = view is TokenView.OWN or rank == 0  # tokens that all ranks see are rank 0's
    assert (records["own_load"] == [64 * is_own, 0, 0, 0] * 2).all()
    assert (records["load_after"] == records["load_before"].mean(axis=1, keepdims=True)).all()
    assert (StageWindow(header, 0).add(rank, records)["floor"] == 1.0).all()
    decisions: list[int] = records["decision"].tolist()
    return decisions


@pytest.mark.parametrize("costs", [GIVEN.to_json(), ""], ids=["given", "measured"])
@pytest.mark.parametrize("view", list(TokenView))
def test_layers_of_two_hosts_are_adopted_routed_and_recorded(
    run_path: Path, view: TokenView, costs: str
) -> None:
    planned = [Decision.PLANNED] * 2
    assert run_ranks(join_hosts, 4, run_path, view, costs) == [planned] * 4
    for host in ("host-0", "host-2"):
        assert (run_path / host / "control").exists()
    assert not list(run_path.glob("host-*/fabric-*"))


def lose_files(rank: int, run_path: Path) -> None:
    """Rank 1 does not come; what rank 0 has left for it is deleted."""
    own, home = EngineRank("test", rank, engine_group(run_path, rank, 2)), run_path / "home"
    meet_in(home)

    def delete(_: HostBackend) -> None:
        while not RunFiles(home).socket(0).exists():
            time.sleep(0.01)
        for path in home.iterdir():
            path.unlink()
        raise FabricError(f"deletes the files in {home} while ranks meet")

    layer = [torch.nn.Parameter(torch.ones(4, 300), False)]
    layers = MovableLayers([layer], SHAPE, TokenView.SHARED, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(HostBackend, "connect", delete)
        with pytest.raises(FabricError, match=f"deletes the files in {home} while ranks meet"):
            BalancedLayers(BalanceConfig(min_batch_tokens=8), own, layers)


def test_deleting_its_files_while_it_loads_is_an_error(run_path: Path) -> None:
    (run_path / "home").mkdir()
    run_ranks(lose_files, 2, run_path)


def compile_for_long(rank: int, run_path: Path) -> str:
    """Rank 3 needs twice the timeout to start, in two batches that warm it up, and in another."""
    shape, location = ExpertShape(4, 8, 1), Location(rank, 4, 2, 2)
    home, group = host_path(run_path, location), engine_group(run_path, rank, 4)
    seconds = 1.0

    def compile_kernels() -> None:
        time.sleep(2 * seconds * (rank == 3))

    calls = count()

    def run_layer(_size: int) -> None:
        if next(calls) == 0:
            compile_kernels()

    meet_in(home)
    config = BalanceConfig(min_batch_tokens=8, timeout_seconds=seconds)
    layer = [torch.nn.Parameter(torch.ones(2, 7), False)]
    pytest.MonkeyPatch().setattr("ultraep_serve.balance.host.fabric.WATCH_SECONDS", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ultraep_serve.balance.host.backend._REPEATS", 1)
        layers = MovableLayers([layer], shape, TokenView.SHARED, run_layer)
        joined = BalancedLayers(config, EngineRank("test", rank, group), layers)
    ids = torch.tensor([[0, 4]], dtype=torch.int32).repeat(64, 1)
    for _ in range(3):  # as graphs are captured
        joined.balancer.route(0, ids[:4], 4)
        joined.balancer.receive()
        joined.balancer.computed()
    for last in (False, False, True):
        if last:
            joined.end_loading(logging.getLogger("test"))
        compile_kernels()
        if last and rank != 3:
            with pytest.raises(PeerTimeoutError, match="did not answer within 1 s") as raised:
                joined.balancer.route(0, ids, 64)
            return str(raised.value)
        if not last:
            joined.balancer.route(0, ids, 64)
            joined.balancer.receive()
            joined.balancer.computed()
    return ""


def test_who_compiles_for_longer_than_the_timeout_is_waited_for(run_path: Path) -> None:
    """Until a first prefill batch was computed."""
    said = run_ranks(compile_for_long, 4, run_path)
    assert "rows of other domains" in said[0]
    assert "rank 3" in said[2]


def refuse_alone(rank: int, run_path: Path, stage: str) -> tuple[str, list[str]]:
    """Rank 1 refuses at a stage of starting; what a rank says, and what is there of us after it."""
    engine, home = engine_group(run_path, rank, 2), run_path / "home"
    meet_in(home)
    config = BalanceConfig(min_batch_tokens=8, timeout_seconds=1.0)
    layer = [torch.nn.Parameter(torch.full((4, size), 1.0 + rank), False) for size in (3000, 7)]

    class Refusing(HostBackend):
        def __init__(self, setup: GroupSetup) -> None:
            self._at("made")
            super().__init__(setup)

        def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
            self._at("adopt")
            return super().adopt(masters)

        def connect(self) -> None:
            super().connect()
            self._at("connect")

        def calibrate(self, run_layer: Callable[[int], None]) -> CostModel:
            if stage == "calibrate":  # on all ranks alike, as a self-check that fails
                raise UnsupportedError("not here")
            return super().calibrate(run_layer)

        def _at(self, where: str) -> None:
            if (rank, stage) == (1, where):
                raise UnsupportedError("not here")

    layers = MovableLayers([layer], SHAPE, TokenView.SHARED, lambda _: None)
    pytest.MonkeyPatch().setattr(joining, "make_backend", lambda _, setup: Refusing(setup))
    with pytest.raises(UnsupportedError) as refused:
        BalancedLayers(config, EngineRank("test", rank, engine), layers)
    assert all((tensor == 1 + rank).all() and len(tensor) == 4 for tensor in layer)
    all_gather_rows(engine.on_host, np.zeros(1, np.int64), 30.0)  # both have come so far
    left = [thread.name for thread in threading.enumerate() if "ultraep" in thread.name]
    left += [line for line in Path("/proc/self/maps").read_text().splitlines() if "ultraep" in line]
    return refused.value.problem, left + [path.name for path in home.iterdir()]


@pytest.mark.parametrize("stage", ["made", "adopt", "connect", "calibrate"])
def test_where_one_rank_cannot_balance_no_rank_does_and_nothing_is_left(
    run_path: Path, stage: str
) -> None:
    (run_path / "home").mkdir()
    told, own = run_ranks(refuse_alone, 2, run_path, stage)
    assert own == ("not here", [])
    assert told == ("not here" if stage == "calibrate" else "rank 1: not here", [])
