"""Batches of random sizes and loads through real balancers on R processes, answers checked.

Every rank can make every rank's tokens, choices and weights from the seed, so it knows what each
output must be; they take turns to compare a layer's. Slots are poisoned after each layer's
computation, where copies stay in them now and then, when the rank also says so: a kernel that reads
a slot before its expert has arrived, or after it was overwritten, gives NaN.
"""

import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.support.costs import FREE
from tests.support.experts import sum_of_experts
from tests.support.hosts import engine_group, host_path
from tests.support.ring_files import KeepsNothing
from ultraep_lab.imbalance import imbalance
from ultraep_serve.balance.backend import GroupSetup, row_width
from ultraep_serve.balance.host.balancer import HostBalancer
from ultraep_serve.balance.host.fabric import HostFabric
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.config import BalanceConfig
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView

_Choice = TypeVar("_Choice")
_CHUNK_BYTES = 4096


@dataclass(frozen=True)
class TinyMoE:
    """Weights of all layers, made from the seed alone, so that every rank can make any of them.

    They are small integers: every sum of products is exact in float32, so any order of summation,
    and any rank that computes it, gives the same bits.
    """

    shape: ExpertShape
    num_layers: int = 3
    hidden: int = 16  # H
    inner: int = 24  # I
    seed: int = 0

    def weights(self, layer: int) -> list[torch.Tensor]:
        """float32 up (E, I, H), down (E, H, I) and bias (E, H): three sizes per expert."""
        rng = np.random.default_rng((self.seed, layer))
        experts, hidden, inner = self.shape.num_logical_experts, self.hidden, self.inner
        shapes = [(experts, inner, hidden), (experts, hidden, inner), (experts, hidden)]
        return [self._numbers(rng, shape) for shape in shapes]

    def masters(self, layer: int, rank: int) -> list[torch.Tensor]:
        """``weights`` of the experts that live on ``rank``, (L, ...) each."""
        first = rank * self.shape.num_masters
        return [
            tensor[first : first + self.shape.num_masters].clone() for tensor in self.weights(layer)
        ]

    def tokens(self, rng: np.random.Generator, num_tokens: int) -> torch.Tensor:
        """Hidden states float32 (T, H)."""
        return self._numbers(rng, (num_tokens, self.hidden))

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-2, 3, size=shape, dtype=np.int8)).float()


@dataclass(frozen=True)
class RandomBatches:
    """What to run; equal on every rank."""

    model: TinyMoE
    view: TokenView
    config: BalanceConfig
    num_batches: int
    relay: str = "auto"
    max_tokens: int = 256  # of one source of tokens
    top_k: int = 2
    policies: tuple[Policy, ...] = (Policy.QUOTA,)  # rank 0 changes between them at random
    bad_id_rate: float = 0.0  # of layers in which one rank's router gives an impossible id
    forget_rate: float = 0.01  # of layers before which one rank's slots lose what has stayed
    pause_rate: float = 0.02  # of layers in which one rank dawdles before it computes
    domain_size: int | None = None  # ranks of each domain, a host of its own; None: one domain
    seed: int = 0

    @property
    def num_sources(self) -> int:
        """Ranks that have tokens of their own; 1 where all share the same."""
        return self.model.shape.num_ranks if self.view is TokenView.OWN else 1


@dataclass
class StressReport:
    """What one rank saw; ``decisions`` is the same on every rank."""

    decisions: list[tuple[int, int, Decision]] = field(default_factory=list)  # batch, layer
    inexact: int = 0  # such layers whose outputs differ in any bit
    corrupt_slots: int = 0  # filled slots whose bytes were not their master's
    before: list[float] = field(default_factory=list)  # imbalance of planned layers, of time
    after: list[float] = field(default_factory=list)
    floor: list[float] = field(default_factory=list)  # the least that ``after`` could be
    plans: int = 0  # checksum of all slots and loads, the same on every rank
    strays: int = 0  # copies outside of their master's domain
    bytes_sent: int = 0
    kept: int = 0  # replicas that computed, of an expert that had been copied in a batch before
    seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """Layers (batches, where none of their layers was looked at) by decision."""
        return dict(Counter(decision.name.lower() for _, _, decision in self.decisions))


@dataclass(frozen=True)
class _LayerInput:
    """One layer of one batch: tokens of all sources, stacked (T_all = sources * T)."""

    x: torch.Tensor  # (T_all, H)
    topk_weights: torch.Tensor  # (T_all, K)
    routed: torch.Tensor  # (T_all, K) what the routers chose, impossible ids included
    valid: torch.Tensor  # (T_all, K) what can be answered: impossible ids are padding


class _Recorder(KeepsNothing):
    """Keeps what the balancer says about itself."""

    def __init__(self, report: StressReport, domain_size: int) -> None:
        self._domain_size = domain_size
        self.batch = 0
        self.forced = set[int]()  # layers of the batch
        self._report = report

    def record(self, record: LayerRecord) -> None:
        decision = Decision(record.decision)
        self._report.decisions.append((self.batch, int(record.layer), decision))
        self._report.bytes_sent += int(record.bytes_sent)
        self._report.kept += int(((record.slot_expert >= 0) & ~record.is_copied).sum())
        if decision is Decision.FORCED:
            self.forced.add(int(record.layer))
        if decision is Decision.PLANNED:
            self._report.before.append(imbalance(record.load_before, record.speed))
            self._report.after.append(imbalance(record.load_after, record.speed))
            by_domain = record.load_before.reshape(-1, self._domain_size).sum(axis=1)
            self._report.floor.append(imbalance(by_domain))
        for values in (record.slot_expert, record.load_after, record.expert_load):
            self._report.plans = zlib.crc32(values.tobytes(), self._report.plans)

    def count_batch(self, decision: Decision) -> None:
        self._report.decisions.append((self.batch, -1, decision))


class _Switch:
    """A policy that somebody else changes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


def run_stress(rank: int, run_path: Path, batches: RandomBatches) -> StressReport:
    """Run all batches as ``rank``; meets the other ranks in ``run_path``."""
    runner = _Runner(rank, run_path, batches)
    started = time.perf_counter()
    for batch in range(batches.num_batches):
        runner.run_batch(batch)
    runner.report.seconds = time.perf_counter() - started
    return runner.report


class _CheckedFabric(HostFabric):
    """Compares slots with their masters as soon as they are said to have arrived."""

    def expect(
        self, layers: list[LayerSlots], weights: list[list[torch.Tensor]], report: StressReport
    ) -> None:
        """``weights`` by layer and tensor are what slots of ``layers`` must hold."""
        self._expected = {
            id(layer): tensors for layer, tensors in zip(layers, weights, strict=True)
        }
        self._report = report

    def wait_slots(self, layer: LayerSlots, slot_expert: NDArray[np.int32]) -> None:
        """As ``HostFabric.wait_slots``; counts slots that hold other bytes."""
        super().wait_slots(layer, slot_expert)
        num_masters = layer.tensors[0].shape[0] - slot_expert.shape[1]
        ranks, slots = np.nonzero(slot_expert >= 0)
        homes = slot_expert[ranks, slots] // num_masters
        size = len(self.domain)
        self._report.strays += int((homes // size != ranks // size).sum())
        for slot, expert in enumerate(slot_expert[self.rank]):
            here = [tensor[num_masters + slot] for tensor in layer.tensors]
            master = [tensor[expert] for tensor in self._expected[id(layer)]]
            if expert >= 0 and not _bytes_equal(here, master):
                self._report.corrupt_slots += 1


class _Runner:
    def __init__(self, rank: int, run_path: Path, batches: RandomBatches) -> None:
        model, view = batches.model, batches.view
        shape = model.shape
        self.report = StressReport()
        self._rank, self._batches, self._shape = rank, batches, shape
        domain_size = batches.domain_size or shape.num_ranks
        location = Location(rank, shape.num_ranks, domain_size, domain_size)
        self._weights = [model.weights(layer) for layer in range(model.num_layers)]
        self._stay = batches.config.slot_memory == "per_layer"
        pool = SlotPool(HostMemory(), shape.num_replica_slots, _CHUNK_BYTES, self._stay)
        self._layers = [pool.adopt(model.masters(layer, rank)) for layer in range(model.num_layers)]
        for layer in self._layers:
            _poison(layer.tensors, shape.num_masters)
        max_chunks = max(layer.chunks.shape[0] for layer in self._layers)
        timeout = batches.config.timeout_seconds
        width = row_width(shape.num_logical_experts, view)
        group = engine_group(run_path, rank, shape.num_ranks)
        all_ranks = group.on_host if location.num_domains > 1 else None
        path = host_path(run_path, location)
        fabric = _CheckedFabric(path, location, width, pool, max_chunks, timeout, all_ranks)
        fabric.expect(self._layers, self._weights, self.report)
        self._recorder = _Recorder(self.report, domain_size)
        self._switch = _Switch(batches.config.policy)
        self._balancer = HostBalancer(
            GroupSetup(
                batches.config,
                shape,
                view,
                location,
                relay=batches.relay,
            ),
            self._layers,
            fabric,
            self._switch if rank == 0 else None,
            self._recorder,  # type: ignore[arg-type]  # no ring: a stand-in keeps what it is told
            FREE,
        )

    def run_batch(self, batch: int) -> None:
        """All layers, then one sum over ranks and the comparison."""
        self._recorder.batch, self._recorder.forced = batch, set()
        common = np.random.default_rng((self._batches.seed, batch))
        private = np.random.default_rng((self._batches.seed, batch, self._rank))
        sizes = _batch_sizes(common, self._batches)
        num_layers = self._batches.model.num_layers
        inputs, outputs = [], []
        for layer in range(num_layers):
            if private.random() < 0.2:
                self._switch.policy = _one_of(self._batches.policies, private)
            given = self._make_input(common, sizes)
            outputs.append(self._run_layer(layer, given, sizes, private))
            inputs.append(given)
        totals = torch.stack(outputs)
        dist.all_reduce(totals)  # the engines' combine; sums are exact in any order
        for layer, given in enumerate(inputs):
            turn = (batch * num_layers + layer) % self._shape.num_ranks
            if turn == self._rank and layer not in self._recorder.forced:
                self._compare(layer, given, totals[layer])

    def _run_layer(
        self,
        layer: int,
        given: _LayerInput,
        sizes: NDArray[np.int64],
        private: np.random.Generator,
    ) -> torch.Tensor:
        """This rank's part of the layer's output (T_all, H)."""
        shape, tensors = self._shape, self._layers[layer].tensors
        if self._stay and private.random() < self._batches.forget_rate:
            for each in self._layers:
                _poison(each.tensors, shape.num_masters)
            self._balancer.forget()
        own = self._own_rows(sizes)
        physical = self._balancer.route(layer, given.routed[own], int(sizes.sum()))
        everyone = physical
        if self._batches.view is TokenView.OWN:
            everyone = self._dispatched(physical, sizes)
        if private.random() < self._batches.pause_rate:
            time.sleep(private.random() * 2e-3)
        self._balancer.receive()
        first_id = self._rank * shape.num_local
        out = _apply_experts(given.x, given.topk_weights, everyone, tensors, first_id)
        self._balancer.computed()
        if not self._stay:
            _poison(tensors, shape.num_masters)
        return out

    def _dispatched(self, physical: torch.Tensor, sizes: NDArray[np.int64]) -> torch.Tensor:
        """Physical ids (T_all, K) of all sources; this rank's are ``physical``."""
        padded = torch.full((int(sizes.max()), physical.shape[1]), -1, dtype=torch.int32)
        padded[: physical.shape[0]] = physical
        everyone = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(everyone, padded)
        return torch.cat([ids[: int(size)] for ids, size in zip(everyone, sizes, strict=True)])

    def _own_rows(self, sizes: NDArray[np.int64]) -> slice:
        if self._batches.view is TokenView.SHARED:
            return slice(None)
        first = int(sizes[: self._rank].sum())
        return slice(first, first + int(sizes[self._rank]))

    def _make_input(self, rng: np.random.Generator, sizes: NDArray[np.int64]) -> _LayerInput:
        """Skewed choices, some padding, and now and then an impossible id."""
        batches, total = self._batches, int(sizes.sum())
        experts = self._shape.num_logical_experts
        exponent = rng.choice([0.0, 0.5, 1.0, 2.0, 5.0])
        weight = rng.permutation(np.arange(1, experts + 1) ** -exponent).astype(np.float32)
        # of exponential times, divided by weights, the shortest are chosen
        times = rng.standard_exponential((total, experts), dtype=np.float32) / weight
        chosen = np.argpartition(times, batches.top_k, axis=1)[:, : batches.top_k].astype(np.int32)
        chosen[rng.random(total) < rng.choice([0.0, 0.1])] = -1
        routed = torch.from_numpy(chosen)
        valid = routed
        if total and rng.random() < batches.bad_id_rate:
            routed = routed.clone()
            routed[rng.integers(total), 0] = int(rng.choice([experts, experts + 1000, -2]))
            valid = torch.where((routed < 0) | (routed >= experts), -1, routed)
        scale = torch.from_numpy(2.0 ** rng.integers(-2, 1, size=chosen.shape)).float()
        return _LayerInput(batches.model.tokens(rng, total), scale, routed, valid)

    def _compare(self, layer: int, given: _LayerInput, total: torch.Tensor) -> None:
        expected = _apply_experts(given.x, given.topk_weights, given.valid, self._weights[layer])
        self.report.inexact += not torch.equal(total, expected)


def _one_of(choices: tuple[_Choice, ...], rng: np.random.Generator) -> _Choice:
    return choices[int(rng.integers(len(choices)))]


def _batch_sizes(rng: np.random.Generator, batches: RandomBatches) -> NDArray[np.int64]:
    """Tokens of each source: tiny and empty ones now and then."""
    largest = int(rng.choice([3, 40, batches.max_tokens]))
    sizes = rng.integers(0, largest + 1, size=batches.num_sources)
    sizes[rng.random(sizes.size) < 0.1] = 0
    return sizes


def _apply_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    ids: torch.Tensor,
    weights: list[torch.Tensor],
    first_id: int = 0,
) -> torch.Tensor:
    """Sum of the chosen experts' outputs (T, H); ids outside ``weights`` add nothing.

    ``x`` (T, H), ``topk_weights`` and ``ids`` (T, K); ``weights`` up (N, I, H), down (N, H, I) and
    bias (N, H) of ids first_id to first_id + N - 1. Expert: ``down @ relu(up @ x) + bias``.
    """
    up, down, bias = weights
    local = ids.long() - first_id
    return sum_of_experts(
        x,
        torch.where((ids >= 0) & (local < up.shape[0]), local, -1),
        topk_weights,
        lambda rows, e: torch.relu(rows @ up[e].T) @ down[e].T + bias[e],
    )


def _poison(tensors: list[torch.Tensor], num_masters: int) -> None:
    """Overwrite the replica slots of ``tensors`` (L + S, ...) with bytes that read as NaN."""
    for tensor in tensors:
        tensor[num_masters:].view(torch.uint8).fill_(0xFF)


def _bytes_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether two experts' tensors hold the same bytes (NaN or not)."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )
