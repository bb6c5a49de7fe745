"""Ranks with small experts whose layers are checked while they serve, without an engine."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.faults import Rank
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.proof.answers import Answers
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.reader import RingReader
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape, Policy, TokenView

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
        dist.init_process_group(
            "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
        )
        self.rank, self.view, self.shape, self.batches = rank, view, shape, 0
        self.state: Any = None  # until the self-check has ended
        self.layers = [self._experts(layer, dtype, factor) for layer in range(LAYERS)]
        defaults = {"costs": COSTS, "timeout_seconds": 30, "min_batch_tokens": 8}
        settings = {**defaults, "run_dir": str(run_path), "self_check": "off", **settings}
        config = BalanceConfig(**settings)
        seed = rank if view is TokenView.OWN else 0
        kind = torch.float32 if dtype is torch.int8 else dtype
        answers = Answers(self.compute, 4, HIDDEN, kind, torch.device("cpu"), seed)
        group = EngineGroup(dist.group.WORLD, dist.group.WORLD)
        own = EngineRank("test", rank, group)
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
