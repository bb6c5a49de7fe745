"""The stages of one rank on a device against their CPU twins, at any size.

Tests run these checks interpreted and small, ``benchmarks/device`` on a GPU at real sizes. A check
raises AssertionError where an answer is wrong, and returns the microseconds that the stage takes in
a CUDA graph; None under the interpreter.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ultraep_kernels.contract import (
    CHECKSUM,
    FLAG_BYTES,
    FORGET,
    HEADER_WIDTH,
    POLICY,
    TIME,
    UNKNOWN,
)
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.exchange import (
    Inboxes,
    exchange,
    inbox_bytes,
    new_epoch,
)
from ultraep_kernels.device.outcome import outcome_width
from ultraep_kernels.device.plan import (
    DevicePlan,
    Gate,
    Given,
    Planner,
    Rows,
    Sender,
    plan_sizes,
)
from ultraep_kernels.device.status import DeviceStatus, new_status
from ultraep_kernels.host.reroute import reroute as reroute_on_cpu

from tests.support.bench import PATIENCE_NS, Bench
from tests.support.ids import count_reference
from tests.support.reroute_alone import places_of, reroute
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import Decision, ExpertShape, Plan

POSTED = 1 << 40  # an epoch that no check reaches


def check_count_and_reroute(
    bench: Bench, ids: torch.Tensor, planned: Plan, num_masters: int
) -> float | None:
    """Logical ``ids`` (T, K) on the device, by what the CPU ``planned`` for them."""
    num_experts = planned.share.shape[0]
    share = torch.from_numpy(planned.share).to(bench.device)
    slot_expert = torch.from_numpy(planned.slot_expert).to(bench.device)
    status = new_status(bench.device)
    count, given = count_of(ids, num_experts), ids.contiguous()
    places = places_of(share, slot_expert, num_masters)

    def route() -> torch.Tensor:
        count(given)
        return reroute(given, places, slot_expert.shape[1], count, status)

    physical, microseconds = bench.replayed(route)
    load, unknown = count_reference(ids.cpu(), num_experts)
    require_equal(count.load, load, "load")
    assert count.unknown.item() == unknown
    twin = reroute_on_cpu(ids.cpu(), planned.share, planned.slot_expert, num_masters)
    require_equal(physical, twin, "physical ids")
    require_ok(status)
    return microseconds


def check_plan(
    bench: Bench,
    loads: NDArray[np.integer],
    shape: ExpertShape,
    source: int = 0,
    domain_size: int | None = None,
    speeds: NDArray[np.int64] | None = None,
) -> float | None:
    """The plan of rank ``source`` for ``loads`` (R, E) and ``speeds`` (R,)."""
    fast = None if speeds is None else torch.from_numpy(speeds).int().to(bench.device)
    on_device, status = torch.from_numpy(loads).int().to(bench.device), new_status(bench.device)
    given = Given(Rows.of(on_device), status, speeds=fast)
    planner = new_planner(given, shape.num_replica_slots, source, domain_size)
    nothing, count = no_ids(on_device)
    _, microseconds = bench.replayed(lambda: planner(nothing, nothing, count))
    found, context = planner.found, PlanContext.of(shape, domain_size, speeds)
    require_same_plan(found, plan_quota(loads, context, source))
    assert found.decision.item() == Decision.PLANNED
    require_ok(status)
    return microseconds


def count_of(ids: torch.Tensor, num_experts: int, **options: Any) -> Count:
    """What counts ``ids`` (T, K), which has not yet; ``options`` of ``Count``."""
    count = Count(num_experts, ids.device, **options)
    count.fit(ids)
    return count


def no_ids(loads: torch.Tensor) -> tuple[torch.Tensor, Count]:
    """What a plan of ``loads`` (R, E) looks up: nothing, and its count."""
    return loads.new_zeros(0), Count(loads.shape[1], loads.device)


def new_planner(
    given: Given, num_slots: int, source: int, domain_size: int | None = None, **others: bool
) -> Planner:
    """Plans for ``source``, without sends; ``others`` of ``PlanSizes``."""
    num_ranks, num_experts = given.loads.table.shape
    sizes = plan_sizes(num_ranks, num_experts, num_slots, domain_size, **others)
    return Planner(sizes, given, Sender(source))


def plan(
    loads: torch.Tensor,
    num_slots: int,
    source: int,
    status: torch.Tensor,
    *,
    domain_size: int | None = None,
    speeds: torch.Tensor | None = None,
    gate: Gate | None = None,
    rows: torch.Tensor | None = None,
    outcome: torch.Tensor | None = None,
) -> DevicePlan:
    """One plan of ``loads`` (R, E) on the device; speeds are measured where rows are alone."""
    of_rows = None if rows is None else Rows.of(rows)
    given = Given(Rows.of(loads), status, of_rows, speeds, gate)
    measures = rows is not None and speeds is None
    planner = new_planner(given, num_slots, source, domain_size, measures_speeds=measures)
    if rows is not None and outcome is None:
        outcome = status.new_zeros(outcome_width(loads.shape[1], loads.shape[0], num_slots))
    nothing, count = no_ids(loads)
    planner(nothing, nothing, count, outcome)
    return planner.found


def check_exchange(bench: Bench, num_ranks: int, num_experts: int) -> float | None:
    """Rank 0's exchange, for which all its peers have posted."""
    width, device = HEADER_WIDTH + num_experts, bench.device
    size = (num_ranks, inbox_bytes(num_ranks, width))
    inboxes = torch.zeros(size, dtype=torch.uint8, device=device)
    ends = num_ranks * FLAG_BYTES
    inboxes[0, :ends].view(torch.int64).view(num_ranks, -1)[1:, 0] = POSTED
    posted = torch.arange(num_ranks * width, dtype=torch.int32, device=device)
    inboxes[0, ends:].view(torch.int32).view(2, num_ranks, width)[:] = posted.view(num_ranks, width)
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    load = posted[:num_experts]
    unknown, choice = (torch.ones(n, dtype=torch.int32, device=device) for n in (1, 3))
    epoch, status = new_epoch(device), new_status(device)

    row = row_reference(load, unknown, choice, has_load=True)
    own = Inboxes(addresses, 0, epoch, status)
    found, microseconds = bench.replayed(lambda: exchange(row, own, PATIENCE_NS))
    expected = posted.view(num_ranks, width).clone()
    expected[0] = row
    require_equal(found, expected, "rows")
    require_ok(status)
    return microseconds


def row_reference(
    load: torch.Tensor, unknown: torch.Tensor, choice: torch.Tensor, has_load: bool
) -> torch.Tensor:
    """Torch twin of ``fill_row``: (W,) int32.

    Args:
        load: (E,) int32.
        unknown: (1,) int32, ids that could not be counted.
        choice: (3,) int32, ``contract.Choice`` of this rank.
        has_load: whether the load follows the header; else the header has its checksum.
    """
    whole = (1 << 32) - 1
    checksum = 0
    for expert, number in enumerate(load.tolist()):
        bits = (number * 0x9E3779B1 + expert * 0x85EBCA77) & whole
        bits = (bits ^ bits >> 15) * 0x2C1B3C6D & whole
        checksum ^= bits ^ bits >> 13
    header = torch.zeros(HEADER_WIDTH, dtype=torch.int64, device=load.device)
    header[[POLICY, TIME, FORGET]] = choice.long()
    header[UNKNOWN], header[CHECKSUM] = unknown[0], 0 if has_load else checksum
    header = header.where(header < 1 << 31, header - (1 << 32)).int()
    return torch.cat([header, load]) if has_load else header


def identity_plan(loads: NDArray[Any], shape: ExpertShape, source_rank: int) -> Plan:
    """Nothing is copied, as where every rank is a domain."""
    return plan_quota(loads, PlanContext.of(shape, 1), source_rank)


def require_same_plan(found: DevicePlan, expected: Plan) -> None:
    """AssertionError unless slots, quotas and share are the same."""
    for name in ("slot_expert", "quota", "share"):
        require_equal(getattr(found, name), getattr(expected, name), name)


def require_equal(found: torch.Tensor, expected: NDArray[Any] | torch.Tensor, what: str) -> None:
    """AssertionError where ``what`` differs from its twin, bit for bit."""
    twin = expected.cpu().numpy() if isinstance(expected, torch.Tensor) else expected
    assert np.array_equal(found.cpu().numpy(), twin), f"{what} differs from its twin"


def require_ok(status: torch.Tensor) -> None:
    """AssertionError where kernels left a word in ``status``."""
    word = DeviceStatus(int(status.item()))
    assert word is DeviceStatus.OK, f"kernels report {word!r}"
