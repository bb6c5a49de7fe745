"""count and reroute against their torch twins, over the edge set."""

import numpy as np
import pytest
import torch
from ultraep_kernels.host.count import count
from ultraep_kernels.host.reroute import reroute

from tests.support.ids import count_reference, edge_ids, plan_of, reroute_reference, skewed_ids
from ultraep_serve.types import ExpertShape, Plan

SHAPES = [ExpertShape(2, 8, 2), ExpertShape(4, 28, 1), ExpertShape(8, 56, 2)]  # L = 7 is prime


def ids_of(shape: ExpertShape) -> dict[str, torch.Tensor]:
    skewed = skewed_ids(shape, 500, seed=1)
    return {
        **edge_ids(shape, skewed),
        "one token": skewed[1:2],
        "NaN logits": torch.full((9, 8), torch.nan).softmax(-1).topk(2).indices,
        "twice the same": skewed[:, :1].repeat(1, 2),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_count_equals_its_twin(shape: ExpertShape) -> None:
    for name, ids in ids_of(shape).items():
        load, unknown = count(ids, shape.num_logical_experts)
        expected, expected_unknown = count_reference(ids, shape.num_logical_experts)
        assert np.array_equal(load, expected), name
        assert unknown == expected_unknown == 0, name
        assert load.sum() == int((ids >= 0).sum()), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_impossible_ids_are_counted_apart(dtype: torch.dtype) -> None:
    lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ids = torch.tensor([[0, -1, 8], [7, -2, highest], [lowest, 3, 3]], dtype=dtype)
    load, unknown = count(ids, 8)
    assert load.tolist() == [1, 0, 0, 2, 0, 0, 0, 1]
    assert unknown == count_reference(ids, 8)[1] == 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reroute_equals_its_twin_and_computes_every_assignment_once(shape: ExpertShape) -> None:
    for name, ids in ids_of(shape).items():
        plan = plan_of(ids, shape)
        physical = reroute(ids, plan.share, plan.slot_expert, shape.num_masters)
        twin = reroute_reference(ids, plan.share, plan.slot_expert, shape.num_masters)
        assert torch.equal(physical, twin), name
        assert physical.dtype == torch.int32
        assert torch.equal(logical_of(physical, plan, shape), ids.int()), name
        computed = torch.bincount(
            physical[physical >= 0] // shape.num_local, minlength=shape.num_ranks
        )
        assert computed.tolist() == plan.quota.sum(axis=0).tolist(), name


def logical_of(physical: torch.Tensor, plan: Plan, shape: ExpertShape) -> torch.Tensor:
    """Which logical expert each physical one is a copy of; -1 for padding."""
    masters = np.arange(shape.num_logical_experts).reshape(shape.num_ranks, -1)
    held = np.concatenate([masters, plan.slot_expert], axis=1).reshape(-1)
    table = torch.from_numpy(np.append(held, -1).astype(np.int32))
    return table[physical.long()]


def test_what_no_rank_was_asked_to_compute_is_an_error() -> None:
    shape = SHAPES[0]
    plan = plan_of(skewed_ids(shape, 100, seed=2), shape)
    more = skewed_ids(shape, 200, seed=2)
    for function in (reroute, reroute_reference):
        with pytest.raises(ValueError, match="fewer assignments"):
            function(more, plan.share, plan.slot_expert, shape.num_masters)


def test_reroute_never_reads_behind_its_tables() -> None:
    shape = SHAPES[0]
    plan = plan_of(skewed_ids(shape, 100, seed=2), shape)
    strange = torch.tensor([[8, 1 << 30], [-5, -1]], dtype=torch.int32)
    arguments = (plan.share, plan.slot_expert, shape.num_masters)
    assert torch.equal(reroute(strange, *arguments), torch.full((2, 2), -1, dtype=torch.int32))
    assert torch.equal(reroute_reference(strange, *arguments), reroute(strange, *arguments))


@pytest.mark.parametrize("tokens", [96, 1009, 4096])
def test_neighbouring_tokens_spread_over_replicas(tokens: int) -> None:
    """Of any 32 tokens in a row, every rank gets its share, give or take a few."""
    shape = ExpertShape(8, 8, 1)
    ids = torch.zeros((tokens, 1), dtype=torch.int32)
    plan = plan_of(ids, shape)
    physical = reroute(ids, plan.share, plan.slot_expert, shape.num_masters)
    ranks = (physical // shape.num_local).view(-1)
    share = plan.share[0] / tokens
    for first in range(0, tokens - 32, 7):
        window = torch.bincount(ranks[first : first + 32], minlength=8).numpy()
        assert np.abs(window - 32 * share).max() <= 4
