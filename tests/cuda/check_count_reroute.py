"""count and reroute on the device against the CPU, over the edge set (run by test_interpreted)."""

import numpy as np
import pytest
import torch
from ultraep_kernels.device.count import BLOCK_IDS, count
from ultraep_kernels.device.reroute import reroute
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.host.count import count_reference
from ultraep_kernels.host.reroute import reroute as reroute_cpu

from tests.support.ids import skewed_ids
from ultraep_serve.planner.quota import plan_quota
from ultraep_serve.types import ExpertShape, Plan

SMALL = [
    ExpertShape(1, 8, 0),  # one rank, no slots
    ExpertShape(2, 14, 2),  # L = 7 is prime, E no power of two
    ExpertShape(8, 64, 1),
]
LARGE = [ExpertShape(72, 504, 4)]  # as large as it gets


def edge_ids(shape: ExpertShape) -> dict[str, torch.Tensor]:
    skewed = skewed_ids(shape, 2 * BLOCK_IDS + 37, 1, top_k=8)
    return {
        "no tokens": torch.empty((0, 8), dtype=torch.int32),
        "only padding": torch.full((5, 3), -1, dtype=torch.int32),
        "one expert": torch.full((301, 1), shape.num_logical_experts - 1, dtype=torch.int32),
        "balanced": torch.arange(shape.num_logical_experts).repeat(2).view(-1, 1),  # int64
        "skewed": skewed,
        "top 1": skewed_ids(shape, BLOCK_IDS, 2, top_k=1).long(),  # exactly one block
        "not contiguous": skewed.t().contiguous().t()[::2],
        "unknown ids": torch.tensor([[0, 1 << 20, -7], [1, -1, shape.num_logical_experts]]),
    }


def plan_of(ids: torch.Tensor, shape: ExpertShape) -> Plan:
    loads = np.zeros((shape.num_ranks, shape.num_logical_experts), np.int64)
    loads[0] = count_reference(ids, shape.num_logical_experts)[0]
    return plan_quota(loads, shape, 0)


@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_count_and_reroute_equal_their_twins(shape: ExpertShape) -> None:
    for name, ids in edge_ids(shape).items():
        if shape in LARGE and name != "skewed":
            continue  # the interpreter is slow
        counted = count(ids, shape.num_logical_experts)
        load, unknown = count_reference(ids, shape.num_logical_experts)
        assert counted.load.tolist() == load.tolist(), name
        assert counted.unknown.tolist() == [unknown], name
        plan, status = plan_of(ids, shape), new_status("cpu")
        share, slot_expert = torch.from_numpy(plan.share), torch.from_numpy(plan.slot_expert)
        physical = reroute(ids, counted, share, slot_expert, shape.num_masters, status)
        expected = reroute_cpu(ids, plan.share, plan.slot_expert, shape.num_masters)
        assert torch.equal(physical, expected), name
        assert status.item() == DeviceStatus.OK, name


def test_highest_and_lowest_ids_of_either_type_are_unknown() -> None:
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        ids = torch.tensor([[0, -1, 8], [7, -2, limits.max], [limits.min, 3, 3]], dtype=dtype)
        counted = count(ids, 8)
        assert counted.load.tolist() == [1, 0, 0, 2, 0, 0, 0, 1]
        assert counted.unknown.item() == 4


def test_strides_of_many_sizes() -> None:
    """One expert on two ranks, for places with few and with many divisors."""
    for places in (1, 2, 3, 7, 210, 256, 360):
        ids = torch.zeros((places, 1), dtype=torch.int32)
        share = np.array([[places // 2, places - places // 2], [0, 0]], np.int32)
        slot_expert = np.array([[-1], [0]], np.int32)
        arguments = torch.from_numpy(share), torch.from_numpy(slot_expert)
        physical = reroute(ids, count(ids, 2), *arguments, 1, new_status("cpu"))
        assert torch.equal(physical, reroute_cpu(ids, share, slot_expert, 1)), places


def test_what_no_rank_was_asked_to_compute_goes_to_its_master() -> None:
    shape = ExpertShape(2, 8, 2)
    plan = plan_of(skewed_ids(shape, 100, 2, top_k=3), shape)
    more = skewed_ids(shape, 200, 2, top_k=3)
    share, slot_expert = torch.from_numpy(plan.share), torch.from_numpy(plan.slot_expert)
    status = new_status("cpu")
    physical = reroute(more, count(more, 8), share, slot_expert, 4, status)
    assert status.item() == DeviceStatus.SHARE_TOO_SMALL
    held = np.concatenate([np.arange(8).reshape(2, 4), plan.slot_expert], axis=1).reshape(-1)
    logical = torch.from_numpy(np.append(held, -1).astype(np.int32))[physical.long()]
    assert torch.equal(logical, more)
