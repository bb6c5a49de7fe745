"""count and reroute on the device against the CPU, over the edge set."""

import numpy as np
import torch
from ultraep_kernels.device.count import _BLOCK_ROWS, BLOCK_IDS
from ultraep_kernels.device.identity import Identity
from ultraep_kernels.device.status import DeviceStatus, new_status

from tests.support.bench import Bench
from tests.support.cases import cases
from tests.support.ids import edge_ids, plan_of, skewed_ids
from tests.support.kernel_checks import check_count_and_reroute, count_of, require_equal
from tests.support.reroute_alone import places_of, reroute
from ultraep_serve.balance.physical import identity_table, master_ids
from ultraep_serve.types import ExpertShape, Plan

SHAPES = [
    ExpertShape(1, 8, 0),  # one rank, no slots
    ExpertShape(2, 14, 2),  # L = 7 is prime, E no power of two
    ExpertShape(8, 64, 1),
]
LARGEST = [(ExpertShape(72, 504, 4), 8), (ExpertShape(56, 896, 2), 16)]


def ids_of(shape: ExpertShape) -> dict[str, torch.Tensor]:
    skewed = skewed_ids(shape, BLOCK_IDS // 2 + 3, 1, top_k=8)  # four blocks and a part of one
    return {
        **edge_ids(shape, skewed),
        "top 1": skewed_ids(shape, BLOCK_IDS, 2, top_k=1).long(),  # exactly one block
        "unknown ids": torch.tensor([[0, 1 << 20, -7], [1, -1, shape.num_logical_experts]]),
    }


@cases("name", ids_of(SHAPES[0]))
@cases("shape", SHAPES)
def test_count_and_reroute_equal_their_twins(bench: Bench, shape: ExpertShape, name: str) -> None:
    ids = ids_of(shape)[name]
    plan = plan_of(ids, shape)
    check_count_and_reroute(bench, ids.to(bench.device), plan, shape.num_masters)


@cases("shape, top_k", LARGEST)
def test_as_many_ranks_and_experts_as_there_are(
    bench: Bench, shape: ExpertShape, top_k: int
) -> None:
    ids = skewed_ids(shape, 40, 1, top_k)
    plan = plan_of(ids, shape)
    check_count_and_reroute(bench, ids.to(bench.device), plan, shape.num_masters)


@cases("shape", SHAPES)
def test_identity_equals_its_twin(bench: Bench, shape: ExpertShape) -> None:
    sizes = shape.num_logical_experts, shape.num_masters, shape.num_slots
    table = identity_table(sizes[0], shape.num_ranks, shape.num_slots)
    for name, ids in ids_of(shape).items():
        given = ids.to(bench.device).contiguous()
        found = torch.empty_like(given)
        Identity(*sizes)(given, found)
        assert found.dtype == ids.dtype
        require_equal(found, master_ids(ids, torch.from_numpy(table)), name)


def test_more_blocks_of_ids_than_are_added_at_a_time(bench: Bench) -> None:
    shape = ExpertShape(2, 2, 1)
    ids = torch.arange(_BLOCK_ROWS * BLOCK_IDS + 5).remainder(3).clamp(max=1).view(-1, 1)
    check_count_and_reroute(bench, ids.to(bench.device), plan_of(ids, shape), 1)


def test_highest_and_lowest_ids_of_either_type_are_unknown(bench: Bench) -> None:
    for dtype in (torch.int32, torch.int64):
        limits = torch.iinfo(dtype)
        ids = torch.tensor([[0, -1, 8], [7, -2, limits.max], [limits.min, 3, 3]], dtype=dtype)
        given = ids.to(bench.device)
        counted = count_of(given, 8)
        counted(given)
        assert counted.load.tolist() == [1, 0, 0, 2, 0, 0, 0, 1]
        assert counted.unknown.item() == 4


@cases("places", [1, 2, 3, 7, 210, 256, 360])
def test_strides_of_places_with_few_and_with_many_divisors(bench: Bench, places: int) -> None:
    """One expert on two ranks."""
    ids = torch.zeros((places, 1), dtype=torch.int32)
    share = np.array([[places // 2, places - places // 2], [0, 0]], np.int32)
    slot_expert = np.array([[-1], [0]], np.int32)
    planned = Plan(slot_expert, copied=slot_expert, quota=share, share=share)
    check_count_and_reroute(bench, ids.to(bench.device), planned, 1)


def test_what_no_rank_was_asked_to_compute_goes_to_its_master(bench: Bench) -> None:
    shape = ExpertShape(2, 8, 2)
    plan = plan_of(skewed_ids(shape, 100, 2, top_k=3), shape)
    more = skewed_ids(shape, 200, 2, top_k=3).to(bench.device)
    share, slot_expert = (
        torch.from_numpy(table).to(bench.device) for table in (plan.share, plan.slot_expert)
    )
    status = new_status(bench.device)
    places = places_of(share, slot_expert, 4)
    counted, more = count_of(more, 8), more.contiguous()
    counted(more)
    physical = reroute(more, places, 2, counted, status)
    assert status.item() == DeviceStatus.SHARE_TOO_SMALL
    held = np.concatenate([np.arange(8).reshape(2, 4), plan.slot_expert], axis=1).reshape(-1)
    logical = torch.from_numpy(np.append(held, -1).astype(np.int32))[physical.cpu().long()]
    assert torch.equal(logical, more.cpu())
