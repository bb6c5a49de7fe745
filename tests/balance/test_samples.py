"""Samples in service find every kind of fault and switch all ranks off; nothing else does."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.faults import FAULTS, Fault, Rank
from tests.support.hosts import engine_group, meet_in
from tests.support.ranks import run_ranks
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.samples import SampleTurns
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape, Policy, TokenView, VerificationCheck

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()
HIDDEN, LAYERS, TOKENS = 16, 3, 60


class SampledRank:
    """One rank with three layers of gated experts, a matrix (L, H, H) and a scale (L, 3) each.

    The matrix is of ``dtype``, of which int8 is float32 without its fractions. It is ``factor``
    times as large as usual, and in each layer four times as large as in the one before.
    """

    def __init__(
        self,
        rank: int,
        run_path: Path,
        view: TokenView,
        shape: ExpertShape = ExpertShape(3, 9, 2),  # noqa: B008  # frozen
        dtype: torch.dtype = torch.float32,
        factor: float = 1.0,
        **settings: Any,
    ) -> None:
        own = EngineRank("test", rank, engine_group(run_path, rank, shape.num_ranks))
        meet_in(run_path)
        self.rank, self.view, self.shape, self.batches = rank, view, shape, 0
        self.state: Any = None  # until the self-check has ended
        self.layers = [self._experts(layer, dtype, factor) for layer in range(LAYERS)]
        defaults = {"costs": COSTS, "timeout_seconds": 30, "min_batch_tokens": 8}
        config = BalanceConfig(**{**defaults, "self_check": "off", **settings})
        seed = rank if view is TokenView.OWN else 0
        kind = torch.float32 if dtype is torch.int8 else dtype
        answers = Answers(self.compute, 4, HIDDEN, kind, torch.device("cpu"), seed)
        layers = MovableLayers(self.layers, shape, view, lambda _: None, answers)
        self.joined = BalancedLayers(config, own, layers)
        self.state = Rank(self.joined.balancer, shape, lambda _: None)  # type: ignore[arg-type]
        self.page, self.files = ControlPage.open(run_path), RunFiles(run_path)

    def _experts(self, layer: int, dtype: torch.dtype, factor: float) -> list[torch.nn.Parameter]:
        random = torch.Generator().manual_seed(100 * layer + self.rank)
        sizes = ((HIDDEN, HIDDEN), (3,))
        matrix, scale = (
            torch.randn(self.shape.num_masters, *size, generator=random) for size in sizes
        )
        matrix = (matrix * (40 if dtype is torch.int8 else factor * 4**layer)).to(dtype)
        return [torch.nn.Parameter(tensor, False) for tensor in (matrix, scale)]

    def compute(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output; where ranks have tokens of their own, they first tell each other.

        As on GPUs, what an expert gives is of the model's type, and so is a rank's part of a sum.
        """
        if self.view is TokenView.OWN:
            x, weights, physical = (
                self._everybodys(t.contiguous()) for t in (x, weights, physical)
            )
        matrix, scale = self.layers[layer]
        local = physical.long() - self.rank * self.shape.num_local
        outputs = torch.zeros(x.shape)
        for token, place in ((local >= 0) & (local < self.shape.num_local)).nonzero().tolist():
            expert = int(local[token, place])
            is_wrong = self.state and self.state.wrong_slots and expert >= self.shape.num_masters
            scaled = scale[0 if is_wrong else expert, 0]
            inner = x[token] @ matrix[expert].to(x.dtype)
            output = (F.silu(inner) * inner) @ matrix[expert].to(x.dtype) * scaled
            outputs[token] += (weights[token, place] * output).to(x.dtype)
        outputs = outputs.to(x.dtype).float()
        dist.all_reduce(outputs)
        outputs = outputs.to(x.dtype)
        own = len(outputs) // self.shape.num_ranks
        return outputs if self.view is TokenView.SHARED else outputs[self.rank * own :][:own]

    def _everybodys(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.shape.num_ranks)]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def serve(self, batches: int = 1) -> None:
        """Batches in which a layer's busiest experts are those of one rank after another."""
        for _ in range(batches):
            for layer in range(LAYERS):
                tokens = TOKENS * (self.shape.num_ranks if self.view is TokenView.OWN else 1)
                self.joined.balancer.route(layer, self._ids(layer), tokens)
                self.joined.balancer.receive()
                self.state.while_computing(layer)
                dist.barrier()  # the engine's combine
                self.joined.balancer.computed()
            self.batches += 1

    def _ids(self, layer: int) -> torch.Tensor:
        seed = (self.batches, layer, self.rank if self.view is TokenView.OWN else 0)
        rng = np.random.default_rng(seed)
        experts, masters = self.shape.num_logical_experts, self.shape.num_masters
        chances = np.full(experts, 0.03)
        chances[masters * layer : masters * layer + 3] = 0.6, 0.16, 0.06
        ids = rng.choice(experts, (TOKENS, 2), p=chances / chances.sum())
        ids[::7] = -1
        return torch.from_numpy(ids.astype(np.int32))

    def serve_mixed(self, seed: int) -> None:
        """A batch of any size and skew, now and then with impossible ids; settings change."""
        common = np.random.default_rng(seed)
        own = np.random.default_rng((seed, self.rank if self.view is TokenView.OWN else 0))
        sources = self.shape.num_ranks if self.view is TokenView.OWN else 1
        sizes = common.integers(0, common.choice([3, 40, 200]) + 1, sources)
        if self.rank == 0 and common.random() < 0.1:
            policies = (Policy.QUOTA, Policy.QUOTA, Policy.QUOTA, Policy.OFF)
            self.page.set_policy(policies[common.integers(len(policies))])
        if common.random() < 0.02:  # weights are loaded anew
            self.layers[int(common.integers(LAYERS))][0][: self.shape.num_masters] *= -1
            self.joined.balancer.forget()
        tokens = sizes[self.rank if sources > 1 else 0]
        for layer in range(LAYERS):
            exponent = common.choice([0.0, 0.5, 1.0, 2.0, 5.0])
            experts = self.shape.num_logical_experts
            chances = common.permutation(np.arange(1, experts + 1) ** -exponent)
            ids = own.choice(experts, (tokens, 2), p=chances / chances.sum())
            ids[own.random(tokens) < common.choice([0.0, 0.1])] = -1
            if tokens and own.random() < 0.01:
                ids[0, 0] = experts + 7
            routed = torch.from_numpy(ids.astype(np.int32))
            self.joined.balancer.route(layer, routed, int(sizes.sum()))
            self.joined.balancer.receive()
            self.joined.balancer.computed()
        self.batches += 1

    def found(self) -> set[str]:
        """Checks of the reports that ranks have left, which are taken away."""
        dist.barrier()
        paths = [self.files.verification(number) for number in range(self.shape.num_ranks)]
        found = {json.loads(path.read_text())["check"] for path in paths if path.exists()}
        dist.barrier()
        with contextlib.suppress(FileNotFoundError):
            self.files.verification(self.rank).unlink()
        return found

    def switch_on(self) -> None:
        """As an operator does."""
        dist.barrier()
        if self.rank == 0:
            self.page.set_policy(Policy.QUOTA)
        dist.barrier()


@dataclass(frozen=True)
class Traffic:
    """Batches without a fault."""

    view: TokenView
    shape: ExpertShape
    dtype: torch.dtype
    batches: int
    domain_size: int = 0  # ranks of each domain; 0: one domain
    factor: float = 1.0  # of the first layer's weights
    slot_memory: str = "per_layer"


def serve_traffic(rank: int, run_path: Path, traffic: Traffic) -> tuple[tuple[int, ...], set[str]]:
    """Layers that were checked, by check; and checks that found something wrong."""
    settings = {
        "verify_every": 1,
        "domain_size": traffic.domain_size,
        "self_check": "full",
        "slot_memory": traffic.slot_memory,
    }
    own = SampledRank(
        rank, run_path, traffic.view, traffic.shape, traffic.dtype, traffic.factor, **settings
    )
    for batch in range(traffic.batches):
        own.serve_mixed(batch)
    found = own.found()
    own.joined._recorder.close()
    with contextlib.closing(RingReader(own.files.ring(rank))) as ring:
        return ring.header().verified_layers, found


SHAPE = ExpertShape(3, 9, 2)
# Batches until a fault is found. Answers are checked in every eighth layer, which comes to each of
# the three in 24; only in some of them the last rank has copies.
MOST = dict.fromkeys(VerificationCheck, 1) | {VerificationCheck.ANSWERS: 9}


def batches_until_off(server: SampledRank, fault: Fault, most: int) -> int:
    """How many batches served with ``fault`` until all ranks are off; ``most`` + 1: they are not.

    The batch that ends it is off; what was found, was found before.
    """
    for batch in range(1, most + 1):
        with pytest.MonkeyPatch.context() as patch:
            if fault.on_all_ranks or server.rank == SHAPE.num_ranks - 1:
                fault.put(server.state, patch)
            server.serve()
        dist.barrier()
        doubted = server.page.is_in_doubt or server.joined.balancer._samples.is_in_doubt
        anybody = torch.tensor([int(doubted)])
        dist.all_reduce(anybody)
        if anybody:
            return batch
    return most + 1


def serve_with_faults(rank: int, run_path: Path, view: TokenView) -> dict[str, Any]:
    """For each fault: batches until it is found, what found it, and what is in force then."""
    server = SampledRank(rank, run_path, view, verify_every=1, slot_memory="shared")
    server.serve(3)
    assert not server.page.is_in_doubt
    outcomes: dict[str, Any] = {"none": server.found()}
    for fault in FAULTS:
        batches = batches_until_off(server, fault, most=MOST[fault.found_by])
        server.serve()
        outcomes[fault.name] = batches, server.found(), server.page.is_in_doubt, server.page.policy
        server.switch_on()
        server.serve()
        assert not server.page.is_in_doubt, fault.name
    return outcomes


@pytest.mark.parametrize("view", list(TokenView))
def test_every_fault_switches_all_ranks_off(run_path: Path, view: TokenView) -> None:
    outcomes = run_ranks(serve_with_faults, 3, run_path, view)
    assert len(FAULTS) >= 12
    for outcome in outcomes:
        assert outcome.pop("none") == set()
        for fault in FAULTS:
            batches, found, in_doubt, policy = outcome[fault.name]
            most = MOST[fault.found_by]
            seen = fault.name, batches, found
            assert batches <= most, seen
            assert in_doubt, seen
            assert policy is Policy.OFF, seen
            assert fault.found_by.name.lower() in found, seen


def serve_rarely_checked(rank: int, run_path: Path) -> tuple[int, dict[str, Any], Any]:
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=7, slot_memory="shared")
    fault = FAULTS[0]
    batches = batches_until_off(server, fault, most=7)
    server.serve()
    report = server.files.verification(2)
    dist.barrier()
    content = json.loads(report.read_text())
    server.joined._recorder.close()
    with contextlib.closing(RingReader(server.files.ring(rank))) as ring:
        return batches, content, ring.header()


def test_a_fault_is_found_after_as_many_batches_as_layers_lie_between_samples(
    run_path: Path,
) -> None:
    outcomes = run_ranks(serve_rarely_checked, 3, run_path)
    batches, report, _ = outcomes[0]
    assert 1 < batches <= 3
    assert report["check"] == "slots"
    assert report["rank"] == 2
    assert report["shape"]["num_logical_experts"] == 9
    assert report["tensors"][0] == {"dtype": "torch.float32", "shape": [5, HIDDEN, HIDDEN]}
    assert "torch" in report["versions"]
    assert str(run_path) not in json.dumps(report)
    headers = [header for _, _, header in outcomes]
    assert all(sum(header.verified_layers) >= 2 for header in headers)
    assert [sum(header.verification_failures) for header in headers][:2] == [0, 0]
    assert headers[2].verification_failures[VerificationCheck.SLOTS] >= 1
    assert all(header.policy is Policy.OFF for header in headers)


@pytest.mark.parametrize(("every", "layers"), [(1, 4), (6, 4), (512, 12), (512, 1), (2, 3)])
def test_samples_take_all_layers_in_turn(every: int, layers: int) -> None:
    turns = SampleTurns(every, layers)
    taken = [turns.next(i % layers) for i in range(40 * (every + layers) * layers)]
    numbers = [i for i, sample in enumerate(taken) if sample is not None]
    assert set(np.diff(numbers)) <= {every, every + 1, every + 2, every + 3}
    assert {i % layers for i in numbers[:layers]} == set(range(layers))
    with_answers = [s.layer for s in taken if s is not None and s.with_answers]
    assert set(with_answers[: 3 * layers]) == set(range(layers))


def serve_with_stale_copies(rank: int, run_path: Path) -> tuple[bool, set[str], bool]:
    """Whether copies stayed, what samples found when masters changed unseen, and in doubt after."""
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=1)
    server.serve(6)
    slots = server.state.balancer._residents[0].slot_expert
    stayed = not server.page.is_in_doubt and bool((slots >= 0).any())
    for layer in server.layers:
        layer[0][: SHAPE.num_masters] *= -1
    dist.barrier()
    server.serve(2)
    found = server.found()
    server.switch_on()
    server.serve(3)
    return stayed, found, server.page.is_in_doubt


def test_copies_that_are_older_than_their_masters_are_found_and_forgotten(run_path: Path) -> None:
    for outcome in run_ranks(serve_with_stale_copies, 3, run_path):
        assert outcome == (True, {"slots"}, False)


def serve_without_samples(rank: int, run_path: Path) -> int:
    server = SampledRank(rank, run_path, TokenView.OWN, verify_every=0)
    before = server.joined.balancer._fabric.epoch
    server.serve()
    epochs: int = server.joined.balancer._fabric.epoch - before
    return epochs


def test_without_samples_nothing_is_exchanged_for_them(run_path: Path) -> None:
    assert run_ranks(serve_without_samples, 3, run_path) == [LAYERS] * 3


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(TokenView.SHARED, ExpertShape(2, 8, 2), torch.bfloat16, 150),
        Traffic(TokenView.SHARED, ExpertShape(2, 8, 2), torch.bfloat16, 50, slot_memory="shared"),
        Traffic(TokenView.OWN, ExpertShape(4, 12, 1), torch.int8, 50, domain_size=2),
        Traffic(
            TokenView.SHARED, ExpertShape(2, 8, 2), torch.float16, 50, factor=500.0
        ),  # overflow
    ],
    ids=str,
)
def test_nothing_is_found_where_nothing_is_wrong(run_path: Path, traffic: Traffic) -> None:
    for verified, found in run_ranks(serve_traffic, traffic.shape.num_ranks, run_path, traffic):
        assert found == set()
        assert min(verified) > 0
