"""Samples in service find every kind of fault and switch all ranks off; nothing else does."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.faults import FAULTS, Fault, Rank
from tests.support.ranks import run_ranks
from ultraep_serve.balance.backend import Answers
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.setup import BalancedLayers, Batch, EngineRank
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy, TokenView, VerificationCheck
from ultraep_serve.verify.samples import SampleTurns

COSTS = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9).to_json()
SHAPE = ExpertShape(3, 9, 2)
HIDDEN, LAYERS, TOKENS = 16, 3, 60


class Server:
    """One rank with three layers of experts, a matrix (L, H, H) and a scale (L, 3) each."""

    def __init__(self, rank: int, run_path: Path, view: TokenView, **settings: Any) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=SHAPE.num_ranks
        )
        self.rank, self.view, self.batches = rank, view, 0
        self.layers = [self._experts(layer) for layer in range(LAYERS)]
        settings = {"costs": COSTS, "timeout_seconds": 30, "min_batch_tokens": 8, **settings}
        config = BalanceConfig(run_dir=str(run_path), self_check="off", **settings)
        seed = rank if view is TokenView.OWN else 0
        answers = Answers(self.compute, 2, HIDDEN, torch.float32, torch.device("cpu"), seed)
        group = EngineGroup(dist.group.WORLD, dist.group.WORLD)
        own = EngineRank("test", rank, group, answers=answers)
        self.joined = BalancedLayers(config, SHAPE, view, self.layers, lambda _: None, own)
        self.state = Rank(self.joined._balancer, SHAPE, lambda _: None)  # type: ignore[arg-type]
        self.page, self.files = self.joined._control, RunFiles(run_path)

    def _experts(self, layer: int) -> list[torch.nn.Parameter]:
        random = torch.Generator().manual_seed(100 * layer + self.rank)
        made = [torch.randn(3, *size, generator=random) for size in ((HIDDEN, HIDDEN), (3,))]
        return [torch.nn.Parameter(tensor, False) for tensor in made]

    def compute(
        self, layer: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """The layer's output; where ranks have tokens of their own, they first tell each other."""
        if self.view is TokenView.OWN:
            x, weights, physical = (everybodys(t.contiguous()) for t in (x, weights, physical))
        matrix, scale = self.layers[layer]
        local = physical.long() - self.rank * SHAPE.num_local
        outputs = torch.zeros_like(x)
        for token, place in ((local >= 0) & (local < SHAPE.num_local)).nonzero().tolist():
            expert = int(local[token, place])
            is_wrong = self.state.wrong_slots and expert >= SHAPE.num_masters
            scaled = scale[0 if is_wrong else expert, 0]
            outputs[token] += weights[token, place] * (x[token] @ matrix[expert]) * scaled
        dist.all_reduce(outputs)
        own = len(outputs) // SHAPE.num_ranks
        return outputs if self.view is TokenView.SHARED else outputs[self.rank * own :][:own]

    def serve(self, batches: int = 1) -> None:
        """Batches in which a layer's busiest experts are those of one rank after another."""
        for _ in range(batches):
            for layer in range(LAYERS):
                tokens = TOKENS * (SHAPE.num_ranks if self.view is TokenView.OWN else 1)
                batch = Batch(tokens)
                self.joined.route(layer, self._ids(layer), batch)
                self.state.while_computing(layer)
                dist.barrier()  # the engine's combine
                self.joined.computed()
            self.batches += 1

    def _ids(self, layer: int) -> torch.Tensor:
        seed = (self.batches, layer, self.rank if self.view is TokenView.OWN else 0)
        rng = np.random.default_rng(seed)
        chances = np.full(9, 0.03)
        chances[3 * layer : 3 * layer + 3] = 0.6, 0.16, 0.06
        ids = rng.choice(9, (TOKENS, 2), p=chances / chances.sum())
        ids[::7] = -1
        return torch.from_numpy(ids.astype(np.int32))

    def found(self) -> set[str]:
        """Checks of the reports that ranks have left, which are taken away."""
        dist.barrier()
        paths = [self.files.verification(number) for number in range(SHAPE.num_ranks)]
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


def everybodys(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(SHAPE.num_ranks)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def batches_until_off(server: Server, fault: Fault, most: int) -> int:
    """How many batches served with ``fault`` until all ranks are off; ``most`` + 1: they are not.

    The batch that ends it is off; what was found, was found before.
    """
    for batch in range(1, most + 1):
        with pytest.MonkeyPatch.context() as patch:
            if fault.on_all_ranks or server.rank == SHAPE.num_ranks - 1:
                fault.put(server.state, patch)
            server.serve()
        dist.barrier()
        doubted = server.page.is_in_doubt or server.joined._balancer._samples.doubt.is_there
        anybody = torch.tensor([int(doubted)])
        dist.all_reduce(anybody)
        if anybody:
            return batch
    return most + 1


def serve_with_faults(rank: int, run_path: Path, view: TokenView) -> dict[str, Any]:
    """For each fault: batches until it is found, what found it, and what is in force then."""
    server = Server(rank, run_path, view, verify_every=1)
    server.serve(3)
    assert not server.page.is_in_doubt
    outcomes: dict[str, Any] = {"none": server.found()}
    for fault in FAULTS:
        batches = batches_until_off(server, fault, most=3)
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
            most = 3 if fault.found_by is VerificationCheck.ANSWERS else 1
            seen = fault.name, batches, found
            assert batches <= most, seen
            assert in_doubt, seen
            assert policy is Policy.OFF, seen
            assert fault.found_by is not None
            assert fault.found_by.name.lower() in found, seen


def serve_rarely_checked(rank: int, run_path: Path) -> tuple[int, dict[str, Any], Any]:
    server = Server(rank, run_path, TokenView.OWN, verify_every=7)
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
    assert report["sizes"]["num_logical_experts"] == 9
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


def serve_without_samples(rank: int, run_path: Path) -> tuple[int, int]:
    server = Server(rank, run_path, TokenView.OWN, verify_every=0)
    before = server.joined._balancer._fabric.epoch
    server.serve()
    return server.joined._balancer._fabric.epoch - before, int(Decision.PLANNED)


def test_without_samples_nothing_is_exchanged_for_them(run_path: Path) -> None:
    assert [epochs for epochs, _ in run_ranks(serve_without_samples, 3, run_path)] == [LAYERS] * 3
