"""JoinedLayers on host parts, without an engine; on device parts it is in tests/device."""

import logging
from pathlib import Path

import pytest
import torch

from ultraep_serve.adapters.joining import JoinedLayers
from ultraep_serve.adapters.parts import parts_for
from ultraep_serve.balancer import TokenView
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.observability.reader import RingReader
from ultraep_serve.observability.schema import RingState, ring_path
from ultraep_serve.testing.ranks import run_ranks
from ultraep_serve.types import Decision, ExpertShape

SHAPE, LAYERS = ExpertShape(2, 8, 1), 2
GIVEN = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9)


def join(rank: int, run_path: Path, view: TokenView) -> list[int]:
    """Decisions of a skewed batch; masters hold 1 on rank 0, 2 on rank 1."""
    config = BalanceConfig(min_batch_tokens=8, run_dir=str(run_path), costs=GIVEN.to_json())
    layers = [
        [torch.nn.Parameter(torch.full((4, size), 1.0 + rank), False) for size in (300, 7)]
        for _ in range(LAYERS)
    ]
    joined = JoinedLayers(config, SHAPE, view, layers, rank, "test", lambda size: None)
    joined.mark_ready()
    joined.log_ready(logging.getLogger("test"))
    ids = torch.tensor([[0, 1]], dtype=torch.int32).repeat(64, 1)
    for index, parameters in enumerate(layers):
        physical = joined.route(index, ids, 64)
        assert (physical // SHAPE.num_local).unique().tolist() == [0, 1]
        for parameter in parameters:
            assert parameter.shape[0] == SHAPE.num_local
            assert (parameter[:4] == 1 + rank).all()
            assert rank == 0 or (parameter[4] == 1).all()  # rank 0's expert has come
        joined.computed()
    ring = RingReader(ring_path(run_path, rank))
    assert ring.header().state is RingState.READY
    decisions: list[int] = ring.recent()["decision"].tolist()
    return decisions


@pytest.mark.parametrize("view", list(TokenView))
def test_layers_are_adopted_routed_and_recorded(run_path: Path, view: TokenView) -> None:
    assert run_ranks(join, 2, run_path, view) == [[Decision.PLANNED] * LAYERS] * 2


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda:0",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs no CUDA GPU"),
        ),
        "meta",
    ],
)
def test_experts_elsewhere_are_refused(run_path: Path, device: str) -> None:
    pytest.importorskip("triton", reason="device parts launch kernels written in Triton")
    config = BalanceConfig(run_dir=str(run_path))
    with pytest.raises(UnsupportedError):
        parts_for(torch.device(device), config, SHAPE, TokenView.OWN, 0)
