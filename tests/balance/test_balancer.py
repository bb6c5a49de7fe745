"""Balancer's decisions on one rank, the other ranks played by a stand-in for the fabric."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ultraep_kernels.contract import TIME

from tests.support.costs import FREE
from tests.support.ring_files import KeepsNothing
from ultraep_serve.balance.backend import CHUNK_BYTES, GroupSetup
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.physical import forced_ids, identity_table
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import IntegerCosts
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

SHAPE = ExpertShape(2, 8, 1)
LAYERS = 2


class OtherRanks:
    """Answers an exchange with this rank's row and what ``answer`` makes of it for rank 1."""

    rank, domain = 0, range(2)

    def __init__(self) -> None:
        self.exchanges = self.streams = self.waits = 0
        self.answer = np.copy

    def exchange(self, row: np.ndarray) -> np.ndarray:
        self.exchanges += 1
        return np.stack([row, self.answer(row)])

    def stream(self, *_: Any) -> None:
        self.streams += 1

    def wait_slots(self, *_: Any) -> None:
        self.waits += 1


class Notes(KeepsNothing):
    """Recorder and policy source in one."""

    def __init__(self) -> None:
        self.policy = Policy.QUOTA
        self.records: list[LayerRecord] = []
        self.batches: list[Decision] = []

    def record(self, record: LayerRecord) -> None:
        self.records.append(record)

    def count_batch(self, decision: Decision) -> None:
        self.batches.append(decision)


class Rig:
    def __init__(
        self,
        view: TokenView = TokenView.SHARED,
        costs: IntegerCosts = FREE,
        **settings: Any,
    ) -> None:
        self.fabric, self.notes = OtherRanks(), Notes()
        config = BalanceConfig(**{"min_batch_tokens": 8, **settings})
        pool = SlotPool(HostMemory(), SHAPE.num_replica_slots, CHUNK_BYTES)
        layers = [pool.adopt([torch.zeros(4, 6)]) for _ in range(LAYERS)]
        self.balancer = HostBalancer(
            GroupSetup(config, SHAPE, view, Location.on_one_host(0, SHAPE.num_ranks)),
            layers,
            self.fabric,  # type: ignore[arg-type]
            self.notes,
            self.notes,
            costs,
        )

    def route(self, ids: torch.Tensor, layer: int = 0) -> torch.Tensor:
        physical = self.balancer.route(layer, ids, ids.shape[0])
        self.balancer.receive()
        self.balancer.experts_done()
        self.balancer.computed()
        self.balancer._record_batch()  # before its last layer
        return physical

    @property
    def decision(self) -> Decision:
        return Decision(self.notes.records[-1].decision)


def skewed(tokens: int = 64) -> torch.Tensor:
    """Everybody wants experts 0 and 1, both of rank 0; every eighth token is padding."""
    ids = torch.tensor([[0, 1]], dtype=torch.int32).repeat(tokens, 1)
    ids[::8] = -1
    return ids


def even(tokens: int = 64) -> torch.Tensor:
    return (torch.arange(tokens * 2, dtype=torch.int32) % 8).view(tokens, 2)


def test_a_skewed_batch_is_planned_replicated_and_rerouted() -> None:
    rig = Rig()
    ids = skewed()
    physical = rig.route(ids)
    assert rig.decision is Decision.PLANNED
    assert rig.fabric.streams == rig.fabric.waits == 1
    record = rig.notes.records[0]
    assert record.load_before.tolist() == [112, 0]
    assert record.load_after.tolist() == [56, 56]
    assert record.replicas == 1
    assert record.bytes_sent == 24
    assert torch.equal(physical < 0, ids < 0)
    by_rank = torch.bincount(physical[physical >= 0] // SHAPE.num_local, minlength=2)
    assert by_rank.tolist() == [56, 56]
    assert min(record.stage_ns) > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_sized_batches_reach_nobody(dtype: torch.dtype) -> None:
    rig = Rig()
    ids = skewed(7).to(dtype)
    for layer in range(LAYERS):
        assert torch.equal(rig.route(ids, layer), rig.balancer.identity(ids))
    assert rig.fabric.exchanges == 0
    assert rig.notes.batches == [Decision.SMALL]
    assert rig.notes.records == []


def test_policy_off_costs_one_exchange_per_batch() -> None:
    rig = Rig()
    rig.notes.policy = Policy.OFF
    for layer in range(LAYERS):
        assert torch.equal(rig.route(skewed(), layer), rig.balancer.identity(skewed()))
        rig.notes.policy = Policy.QUOTA  # counts from the next batch on
    assert rig.fabric.exchanges == 1
    assert rig.notes.batches == [Decision.POLICY_OFF]
    rig.route(skewed())
    assert rig.decision is Decision.PLANNED


def test_balanced_layers_are_left_alone() -> None:
    rig = Rig(max_imbalance=1.1)
    assert torch.equal(rig.route(even()), rig.balancer.identity(even()))
    assert rig.decision is Decision.BALANCED
    nearly = even()
    nearly[:3, 0] = 0  # 1.05: three of 64 tokens moved from rank to rank at most
    assert torch.equal(rig.route(nearly), rig.balancer.identity(nearly))
    assert rig.decision is Decision.BALANCED
    assert rig.fabric.streams == 0


def test_speeds_that_ranks_measure_reach_the_plan() -> None:
    """Rank 1 publishes three times rank 0's time per assignment."""
    rig = Rig(costs=replace(costs(0), per_assignment=10**8), speeds="auto")

    def slower(row: np.ndarray) -> np.ndarray:
        other = row.copy()
        other[TIME] *= 3
        return other

    rig.fabric.answer = slower
    for batch in range(46):
        rig.balancer.route(0, skewed(1536), 1536)
        rig.balancer.receive()
        time.sleep(0.002)
        rig.balancer.experts_done()
        rig.balancer.computed()
        rig.balancer._record_batch()
        assert rig.notes.records[-1].experts_ns >= 2_000_000
        if batch == 40:
            assert rig.notes.records[-1].load_after.tolist() == [1344, 1344]
    speeds = rig.notes.records[-1].speed
    assert speeds.tolist() == [1024, 352]  # a third in whole thirty-seconds
    assert rig.notes.records[-1].load_after == pytest.approx([2001, 687], rel=0.01)


@pytest.mark.parametrize("num_experts", [256, 250])
def test_ideal_is_even_over_a_group_whose_ranks_have_few_tokens(num_experts: int) -> None:
    """The ranks' turns follow one another; no token has one expert twice."""
    ranks, slots, speeds = 64, 2, torch.full((64,), 1024)
    table = torch.from_numpy(identity_table(num_experts, ranks, slots))
    ids = torch.arange(17 * 8).view(17, 8)
    taken = [forced_ids(ids, table, speeds, rank * ids.numel()) for rank in range(ranks)]
    assert all(len(set(token.tolist())) == 8 for token in torch.cat(taken))
    by_rank = torch.bincount(torch.cat(taken).view(-1) // 6, minlength=ranks)
    assert by_rank.max() - by_rank.min() <= 1


@pytest.mark.parametrize("bad_id", [8, -2, 1 << 20])
def test_an_impossible_id_anywhere_means_identity(
    bad_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    ids = skewed()
    ids[5, 0] = bad_id
    for _ in range(3):
        assert torch.equal(rig.route(ids), rig.balancer.identity(ids))
        assert rig.decision is Decision.INCONSISTENT
    assert rig.fabric.streams == 0
    assert len(caplog.records) == 1
    rig.route(skewed())
    assert rig.decision is Decision.PLANNED


def costs(per_expert_sent: int) -> IntegerCosts:
    return IntegerCosts(
        per_assignment=1000,
        per_expert_read=0,
        per_expert_sent=per_expert_sent,
        per_relay_hop=0,
        exchange=0,
        plan=0,
    )


def test_weights_move_only_where_that_saves_time() -> None:
    # 112 assignments on rank 0, none on rank 1: one copied expert saves at most 56 of them.
    cheap, dear = Rig(costs=costs(55_000)), Rig(costs=costs(57_000))
    for rig in (cheap, dear):
        rig.route(skewed())
    assert cheap.decision is Decision.PLANNED
    assert dear.decision is Decision.UNPROFITABLE
    assert dear.fabric.streams == 0
    assert torch.equal(dear.route(skewed()), dear.balancer.identity(skewed()))
