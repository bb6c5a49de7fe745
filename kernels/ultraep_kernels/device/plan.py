"""plan: loads (R, E) and speeds -> slot_expert, quota and this rank's share; the quota planner.

One launch (``_plan_kernel``): the search, which ends early where a layer is left alone, and what
writes the plan out, with all that stages after it need. It may follow the plan as well: a layer for
which nothing is expected to come of it then takes no launch more. Twin: ``host.plan.plan``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from ultraep_kernels.contract import MIN_FAN_OUT_SAVED, Search, search_of
from ultraep_kernels.device._plan_kernel import COUNTERS, Given, plan_kernel
from ultraep_kernels.device.count import Counted, blocks_of, ids_of
from ultraep_kernels.device.launch import launch
from ultraep_kernels.device.relays import Sends, least_saved, new_sends, relay_rule
from ultraep_kernels.device.reroute import AssignSizes, Places, new_places
from ultraep_kernels.device.stream import Programs, StreamSizes, StreamTables

__all__ = [
    "Copies",
    "DevicePlan",
    "FollowUp",
    "Gate",
    "PlanBuffers",
    "Sender",
    "new_plan_buffers",
    "plan",
]

_EXPERTS_SUMMED = 8  # by one program
_EXPERTS_WRITTEN = 8  # by one, in a layer that is expected to be left alone
_MOST_REGISTERS = 192  # of a thread; left to itself the assembler keeps to 168, and spills
_TILE_IDS = 16  # compared with those of a block at a time, by a program of one warp
_BLOCK_WORDS = 1024  # of 4 bytes, per step of a copy by one
_BLOCK_FLAGS = 256  # looked at together


@dataclass(frozen=True)
class Gate:
    """When a plan is followed; costs in picoseconds, as in ``ultraep_serve.costs``.

    Planning itself is no cost: it is spent by the time it could count.
    The defaults follow every plan that lowers the time of the busiest rank.
    """

    max_imbalance: float = 1.0  # loads at or below this max/mean are left alone; in millionths
    per_assignment: int = 1
    per_expert_read: int = 0
    per_expert_sent: int = 0


class Sender(NamedTuple):
    """Whose sends are planned along with the slots."""

    rank: int
    relay: str  # as for ``relays.plan_sends``, as is ``min_saved``
    epoch: torch.Tensor | None = None  # (2,) int64 as the exchange left it, to go with the sends
    min_saved: int = MIN_FAN_OUT_SAVED


class Copies(NamedTuple):
    """How experts are sent and awaited in the launch that plans."""

    tables: StreamTables  # of the layer
    patience_ns: int  # nanoseconds after which a wait is given up
    programs: Programs
    reported: torch.Tensor  # (1,) int32 in page-locked memory: the status of a wait given up


class FollowUp(NamedTuple):
    """What follows a plan in its launch: ids are looked up, and experts sent and awaited or not."""

    ids: torch.Tensor  # (T, K) int32 or int64, logical
    counted: Counted  # of these ids
    physical: torch.Tensor  # (T, K) of their type, out
    copies: Copies | None = None


class DevicePlan(NamedTuple):
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert in each slot, -1 empty
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota
    expert_load: torch.Tensor  # (E,) int32: assignments of each expert over all ranks
    decision: torch.Tensor  # (1,) int32: number of a Decision
    places: Places  # of the share
    sends: Sends  # written where there is a ``Sender``


class Rows(NamedTuple):
    """Integers of every rank, side by side in rows that may be apart."""

    table: torch.Tensor
    stride: int  # from one row to the next


class GateValues(NamedTuple):
    """A ``Gate`` for a kernel."""

    max_imbalance: int  # in millionths; rank 0's row may overrule it
    per_assignment: int  # picoseconds
    per_read: int
    per_sent: int


class PlanSizes(NamedTuple):
    """What ``plan_kernel`` is compiled for."""

    num_ranks: int
    num_masters: int
    num_slots: int  # of a rank, planned for
    all_slots: int  # of a rank
    first_slot: int  # of those, from which ``num_slots`` are planned for
    domain_size: int
    num_domains: int
    search: Search  # without attempts where nothing can be copied
    num_sums: int  # programs that add up loads
    num_finished: int  # programs that write the plan out
    block_all_experts: int
    block_all_ranks: int
    block_experts: int  # of a domain
    block_masters: int
    block_ranks: int  # of a domain
    block_slots: int
    block_keys: int
    experts_summed: int = _EXPERTS_SUMMED
    masters_at_once: int = 8  # of every rank, added up together

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_masters

    @property
    def num_attempts(self) -> int:
        """In each domain."""
        return self.search.limit + self.search.thrifty

    @property
    def num_programs(self) -> int:
        """Of a launch that does not follow the plan."""
        return self.num_sums + self.num_domains * self.num_attempts + self.num_finished


class Attempts(NamedTuple):
    """What the attempts of every domain found; tensors on the device."""

    ranks: torch.Tensor  # (R, 2) int32: assignments to its masters, speed
    goal: torch.Tensor  # (1,) int64: a time
    keys: torch.Tensor  # (domains, attempts + 1) int64: of each, of the identity
    left: torch.Tensor  # (domains, attempts, D * L) int32: what masters still compute
    placed: torch.Tensor  # (domains, attempts, S, D, 2) int32: logical expert, what it computes
    reached: torch.Tensor  # (domains, attempts, 2) int32: busiest rank's time, most replicas on one
    winners: torch.Tensor  # (domains,) int32: the attempt to take, -1 the identity
    turns: torch.Tensor  # (COUNTERS,) int32, zero between launches: turns, then arrivals


@dataclass(frozen=True)
class PlanBuffers:
    """What plans of one size are written to, layer after layer."""

    sizes: PlanSizes
    found: DevicePlan
    attempts: Attempts


def new_plan_buffers(
    num_ranks: int,
    num_experts: int,
    num_replica_slots: int,
    device: torch.device | str,
    *,
    domain_size: int | None = None,
    first_slot: int = 0,
    all_slots: int | None = None,
    decision: torch.Tensor | None = None,
) -> PlanBuffers:
    """For plans of R, E, and S slots of a rank: from ``first_slot`` on, of ``all_slots``.

    ``decision`` (1,) int32 where it is to lie: plans of one batch share it.
    """
    slots = num_replica_slots if all_slots is None else all_slots
    sizes = _sizes_of(num_ranks, num_experts, num_replica_slots, domain_size, first_slot, slots)
    if decision is None:
        decision = torch.zeros(1, dtype=torch.int32, device=device)
    return PlanBuffers(sizes, _empty_plan(sizes, decision), _empty_attempts(sizes, device))


def plan(
    loads: torch.Tensor,
    num_replica_slots: int,
    source_rank: int,
    status: torch.Tensor,
    *,
    domain_size: int | None = None,
    speeds: torch.Tensor | None = None,
    gate: Gate | None = None,
    rows: torch.Tensor | None = None,
    sender: Sender | None = None,
    outcome: torch.Tensor | None = None,
    buffers: PlanBuffers | None = None,
    begins: bool = True,
    follow_up: FollowUp | None = None,
) -> DevicePlan:
    """Plan one layer of one batch: the same slots and quotas on every rank, as on CPU.

    Args:
        loads: int32 (R, E) on the device, rows may be apart; row r is what rank r's own
            tokens chose. E is a multiple of R.
        num_replica_slots: S, may be 0.
        source_rank: rank whose ``share`` is wanted.
        status: (1,) int32. Loads that are negative, together more than 2**28, or take a rank more
            time than 2**28 assignments at FULL_SPEED, set IMPOSSIBLE_LOADS and give the identity.
        domain_size: copies stay within contiguous groups of this many ranks; None is all ranks.
        speeds: int32 (R,) on the device, each 1 to FULL_SPEED; None is all ranks equally fast.
        gate: where the plan does not pass it, the identity is written and the decision says why;
            None follows every plan.
        rows: (R, .) int32, all ranks' rows as ``exchange.fill_row`` made them: rank 0's says
            whether to plan at all (its policy).
            Where a rank saw unknown ids, checksums differ or ``status`` says that a wait was given
            up, the identity is written.
        sender: whose sends are wanted too.
        outcome: (``outcome_width``,) int32, where what the host records is packed, of rows and
            speeds too; None: not wanted.
        buffers: to write to, of the same sizes. With them quota, share and places are written
            for a plan that is followed only.
        begins: without it, and with rows, the decision of the layer before is in ``buffers``:
            where it says that the batch's policy is off, it stays so and nothing is planned.
        follow_up: what the launch is to do as well, as ``reroute``, and where it has ``copies``
            ``stream`` and ``receive``, would; with a sender that names the epoch.

    Raises:
        ValueError: E is no multiple of R, or a row's experts do not lie side by side.
    """
    if loads.stride(1) != 1:
        raise ValueError(f"{loads.stride() = }: experts must lie side by side")
    num_ranks, num_experts = loads.shape
    own = buffers or new_plan_buffers(
        num_ranks, num_experts, num_replica_slots, loads.device, domain_size=domain_size
    )
    assert begins or buffers is not None, "nothing is known of the layer before"
    assert follow_up is None or (sender and sender.epoch is not None), "nobody to send"
    assert outcome is None or (rows is not None and speeds is not None), "not all is known"
    sizes = own.sizes
    epoch = None
    if sender:
        epoch = own.found.sends.epoch if sender.epoch is None else sender.epoch
    places = num_ranks * sizes.all_slots
    if follow_up and follow_up.copies:
        sizes = sizes._replace(num_finished=1 + -(-num_experts // _EXPERTS_WRITTEN))
    number, follows = sizes.num_programs, dict[str, Any]()
    if follow_up:
        number += blocks_of(follow_up.ids.numel()) + _num_copying(follow_up.copies, sizes)
        follows = _follows(follow_up, sizes)
    launch(
        plan_kernel,
        (number,),
        Given(
            Rows(loads, loads.stride(0)),
            None if rows is None else Rows(rows, rows.stride(0)),
            speeds,
            _values_of(gate) if gate else None,
            status,
        ),
        own.attempts,
        own.found,
        outcome,
        int(begins or rows is None),
        source_rank,
        sender.rank if sender else 0,
        least_saved(sender.relay, sender.min_saved, places) if sender else 0,
        epoch,
        SIZES=sizes,
        RELAYS=relay_rule(
            num_ranks,
            sizes.num_masters,
            sizes.all_slots,
            sender.relay if sender else "never",
            sizes.domain_size,
        ),
        LEAVES_EARLY=buffers is not None,
        **follows,
        num_warps=1,
        maxnreg=_MOST_REGISTERS,
    )
    return own.found


def _values_of(gate: Gate) -> GateValues:
    return GateValues(
        round(gate.max_imbalance * 10**6),
        gate.per_assignment,
        gate.per_expert_read,
        gate.per_expert_sent,
    )


def _sizes_of(
    num_ranks: int,
    num_experts: int,
    num_replica_slots: int,
    domain_size: int | None,
    first_slot: int,
    all_slots: int,
) -> PlanSizes:
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    size, masters = min(domain_size or num_ranks, num_ranks), num_experts // num_ranks
    search = search_of(size, masters)
    if num_replica_slots == 0 or size == 1:
        search = search._replace(limit=0, thrifty=0)
    return PlanSizes(
        num_ranks=num_ranks,
        num_masters=masters,
        num_slots=num_replica_slots,
        all_slots=all_slots,
        first_slot=first_slot,
        domain_size=size,
        num_domains=-(-num_ranks // size),
        search=search,
        num_sums=-(-num_experts // _EXPERTS_SUMMED),
        num_finished=1 + num_experts,
        block_all_experts=_block(num_experts),
        block_all_ranks=_block(num_ranks),
        block_experts=_block(size * masters),
        block_masters=_block(masters),
        block_ranks=_block(size),
        block_slots=int(triton.next_power_of_2(max(1, num_replica_slots))),
        block_keys=_block(search.limit),
    )


def _empty_plan(sizes: PlanSizes, decision: torch.Tensor) -> DevicePlan:
    ranks, experts, device = sizes.num_ranks, sizes.num_experts, decision.device
    all_slots = sizes.all_slots
    return DevicePlan(
        slot_expert=torch.empty((ranks, all_slots), dtype=torch.int32, device=device),
        quota=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        share=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        expert_load=torch.empty(experts, dtype=torch.int32, device=device),
        decision=decision,
        places=new_places(experts, ranks, device),
        sends=new_sends(ranks, all_slots, device),
    )


def _empty_attempts(sizes: PlanSizes, device: torch.device | str) -> Attempts:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    of_attempts, size = (sizes.num_domains, sizes.num_attempts), sizes.domain_size
    return Attempts(
        ranks=empty(sizes.num_ranks, 2),
        goal=empty(1, dtype=torch.int64),
        keys=empty(sizes.num_domains, sizes.num_attempts + 1, dtype=torch.int64),
        left=empty(*of_attempts, size * sizes.num_masters),
        placed=empty(*of_attempts, sizes.num_slots, size, 2),
        reached=empty(*of_attempts, 2),
        winners=empty(sizes.num_domains).fill_(-1),
        turns=empty(COUNTERS).zero_(),
    )


def _follows(follow_up: FollowUp, sizes: PlanSizes) -> dict[str, Any]:
    """What ``reroute`` and ``stream`` are given, but for the plan."""
    ranks, copies = sizes.num_ranks, follow_up.copies
    layout = ranks, sizes.num_masters, sizes.all_slots
    assigns = AssignSizes(*layout, search_steps=(ranks - 1).bit_length(), tile=_TILE_IDS)
    ids = {"out_ptr": follow_up.physical, **ids_of(follow_up.ids, follow_up.counted)}
    if copies is None:
        return {"ASSIGNS": assigns, **ids}
    programs = _programs_of(copies, sizes)
    return {
        **ids,
        "tables": copies.tables,
        "reported_ptr": copies.reported,
        "patience_ns": copies.patience_ns,
        "ASSIGNS": assigns,
        "STREAMS": StreamSizes(*layout, programs, block=_BLOCK_WORDS, block_flags=_BLOCK_FLAGS),
    }


def _num_copying(copies: Copies | None, sizes: PlanSizes) -> int:
    """Programs that send, forward and await experts."""
    return sum(_programs_of(copies, sizes)) + max(1, sizes.all_slots) if copies else 0


def _programs_of(copies: Copies, sizes: PlanSizes) -> Programs:
    return copies.programs if sizes.all_slots else Programs(0, 0)


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
