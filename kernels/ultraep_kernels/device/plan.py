"""plan: loads (R, E) and speeds -> slot_expert, quota and this rank's share; the quota planner.

One launch (``_plan_kernel``): the search, which ends early where a layer is left alone, and what
writes the plan out, with all that stages after it need. It may follow the plan as well: a layer for
which nothing is expected to come of it then takes no launch more. Twin: ``host.plan.plan``.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from ultraep_kernels.contract import Search, search_of
from ultraep_kernels.device._plan_kernel import COUNTERS, plan_kernel
from ultraep_kernels.device.count import BLOCK_IDS, Counted, blocks_of
from ultraep_kernels.device.launch import launch
from ultraep_kernels.device.relays import Sends, new_sends, relay_constants
from ultraep_kernels.device.reroute import Places, new_places
from ultraep_kernels.device.stream import StreamTables

__all__ = [
    "DevicePlan",
    "FollowUp",
    "Gate",
    "PlanBuffers",
    "Sender",
    "new_plan_buffers",
    "plan",
]

_BLOCK_COLUMNS = 32  # experts per program of the sum
_BLOCK_MASTERS = 8  # of every rank, added at a time
_BLOCK_EXPERTS = 4  # per program that writes the plan out
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
    relay: str  # as for ``relays.plan_sends``
    epoch: torch.Tensor | None = None  # (2,) int64 as the exchange left it, to go with the sends


class FollowUp(NamedTuple):
    """What follows a plan where no other launch does: ids are looked up, experts sent, awaited."""

    ids: torch.Tensor  # (T, K) int32 or int64, logical
    counted: Counted  # of these ids
    physical: torch.Tensor  # (T, K) of their type, out
    tables: StreamTables  # of the layer
    patience_ns: int  # nanoseconds after which a wait is given up
    num_programs: int  # of senders and of relays
    reported: torch.Tensor  # (1,) int32 in page-locked memory: the status of a wait given up


@dataclass(frozen=True)
class DevicePlan:
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert in each slot, -1 empty
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota
    expert_load: torch.Tensor  # (E,) int32: assignments of each expert over all ranks
    decision: torch.Tensor  # (1,) int32: number of a Decision
    places: Places  # of the share
    sends: Sends  # written where there is a ``Sender``


class _Sizes(NamedTuple):
    """What the launches of one call have in common."""

    num_ranks: int
    num_masters: int
    num_slots: int
    domain_size: int
    search: Search
    limit: int  # attempts of both waves in each domain; 0 where nothing can be copied
    thrifty: int  # attempts after them

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.num_masters

    @property
    def num_domains(self) -> int:
        return -(-self.num_ranks // self.domain_size)

    @property
    def num_sums(self) -> int:
        """Programs that add up loads."""
        return -(-self.num_experts // _BLOCK_COLUMNS)

    @property
    def num_finished(self) -> int:
        """Programs that write the plan out."""
        return 1 + -(-self.num_experts // _BLOCK_EXPERTS)

    @property
    def num_programs(self) -> int:
        """Of a launch that does not follow the plan."""
        return self.num_sums + self.num_domains * (self.limit + self.thrifty) + self.num_finished


class _Attempts(NamedTuple):
    """What the attempts of every domain found; tensors on the device."""

    keys: torch.Tensor  # (domains, attempts + 2) int64: of each, of the identity, the goal
    held: torch.Tensor  # (domains, attempts, S, D) int32: logical experts in the slots
    quotas: torch.Tensor  # (domains, attempts, S, D) int32: what each of them computes
    reached: torch.Tensor  # (domains, attempts, 2) int32: busiest rank's time, most replicas on one
    winners: torch.Tensor  # (domains,) int32: the attempt to take, -1 the identity
    turns: torch.Tensor  # (COUNTERS,) int32, zero between launches


@dataclass(frozen=True)
class PlanBuffers:
    """What plans of one size are written to, layer after layer."""

    sizes: _Sizes
    found: DevicePlan
    attempts: _Attempts
    first_slot: int  # of a rank's, from which ``sizes.num_slots`` are planned for

    def changed_by(self, follow_up: FollowUp) -> dict[str, Any]:
        """What ``Launches`` of a plan that is followed take anew for other ids."""
        ids, num_slots = follow_up.ids.reshape(-1), self.found.slot_expert.shape[1]
        num_blocks = blocks_of(ids.numel())
        senders = 2 * follow_up.num_programs if num_slots else 0
        return {
            "grid": (self.sizes.num_programs + num_blocks + senders + max(1, num_slots),),
            "ids_ptr": ids,
            "before_ptr": follow_up.counted.before,
            "out_ptr": follow_up.physical,
            "num_ids": ids.numel(),
            "num_blocks": num_blocks,
        }


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
    sizes = _sizes_of(num_ranks, num_experts, num_replica_slots, domain_size)
    slots = num_replica_slots if all_slots is None else all_slots
    if decision is None:
        decision = torch.zeros(1, dtype=torch.int32, device=device)
    found = _empty_plan(sizes, slots, decision)
    return PlanBuffers(sizes, found, _empty_attempts(sizes, device), first_slot)


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
        loads: int32 or int64 (R, E) on the device, rows may be apart; row r is what rank r's own
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
            whether to plan at all (its policy), and may set another threshold than the gate's.
            Where a rank saw unknown ids, checksums differ or ``status`` says that a wait was given
            up, the identity is written.
        sender: whose sends are wanted too.
        outcome: (``outcome_width``,) int32, where what the host records is packed, of rows and
            speeds too; None: not wanted.
        buffers: to write to, of the same sizes. With them quota, share and places are written
            for a plan that is followed only.
        begins: without it, and with rows, the decision of the layer before is in ``buffers``:
            where it says that the batch's policy is off, it stays so and nothing is planned.
        follow_up: what the launch is to do as well, as ``reroute`` and ``stream`` would; with a
            sender that names the epoch.

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
    sizes, found, attempts, limits = own.sizes, own.found, own.attempts, gate or Gate()
    search, num_ranks = sizes.search, sizes.num_ranks
    all_slots = found.slot_expert.shape[1]
    changed = own.changed_by(follow_up) if follow_up else {"grid": (sizes.num_programs,)}
    relay = sender.relay if sender else "never"
    constants = relay_constants(num_ranks, all_slots, relay, sizes.domain_size)
    places = constants.pop("BLOCK")
    launch(
        plan_kernel,
        changed.pop("grid"),
        loads,
        loads.stride(0),
        found.expert_load,
        found.expert_load if speeds is None else speeds,
        attempts.keys,
        attempts.held,
        attempts.quotas,
        attempts.reached,
        found.expert_load if rows is None else rows,
        0 if rows is None else rows.stride(0),
        attempts.winners,
        found.decision,
        status,
        attempts.turns,
        round(limits.max_imbalance * 10**6),
        limits.per_assignment,
        limits.per_expert_read,
        limits.per_expert_sent,
        int(begins),
        found.slot_expert,
        found.quota,
        found.share,
        found.places.ends,
        found.places.physical,
        found.places.stride,
        found.sends.parents,
        found.sends.tasks,
        found.sends.turn,
        found.sends.decision,
        found.sends.epoch,
        found.sends.epoch if sender is None or sender.epoch is None else sender.epoch,
        found.expert_load if outcome is None else outcome,
        source_rank,
        sender.rank if sender else 0,
        **changed,
        **(_tables_of(follow_up) if follow_up else {}),
        NUM_RANKS=num_ranks,
        NUM_MASTERS=sizes.num_masters,
        NUM_SLOTS=sizes.num_slots,
        DOMAIN_SIZE=sizes.domain_size,
        GRAIN=search.grain,
        FIRST=search.first,
        LIMIT=sizes.limit,
        THRIFTY=sizes.thrifty,
        SWEEPS=search.sweeps,
        NUM_SUMS=sizes.num_sums,
        NUM_DOMAINS=sizes.num_domains,
        HAS_SPEEDS=speeds is not None,
        HAS_ROWS=rows is not None,
        HAS_GATE=gate is not None,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        BLOCK_ALL_EXPERTS=_block(sizes.num_experts),
        BLOCK_ALL_RANKS=_block(num_ranks),
        BLOCK_EXPERTS=_block(sizes.domain_size * sizes.num_masters),
        BLOCK_RANKS=_block(sizes.domain_size),
        BLOCK_SLOTS=triton.next_power_of_2(max(1, sizes.num_slots)),
        BLOCK_MASTERS=_BLOCK_MASTERS,
        BLOCK_KEYS=_block(sizes.limit),
        ALL_SLOTS=all_slots,
        FIRST_SLOT=own.first_slot,
        HAS_SENDS=sender is not None and all_slots > 0,
        HAS_OUTCOME=outcome is not None,
        LEAVES_EARLY=buffers is not None,
        BLOCK_PLACES=places,
        BLOCK_WRITTEN=_BLOCK_EXPERTS,
        **constants,
        NUM_FINISHED=sizes.num_finished,
        FOLLOWS=follow_up is not None,
        NUM_SENDERS=follow_up.num_programs if follow_up and all_slots else 0,
        SEARCH_STEPS=(num_ranks - 1).bit_length(),
        BLOCK_IDS=BLOCK_IDS,
        TILE_IDS=_TILE_IDS,
        BLOCK_WORDS=_BLOCK_WORDS,
        BLOCK_FLAGS=_BLOCK_FLAGS,
        num_warps=1,
    )
    return own.found


def _sizes_of(
    num_ranks: int, num_experts: int, num_replica_slots: int, domain_size: int | None
) -> _Sizes:
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    size = min(domain_size or num_ranks, num_ranks)
    search = search_of(size, num_experts // num_ranks)
    limit, thrifty = search.limit, search.thrifty
    if num_replica_slots == 0 or size == 1:
        limit = thrifty = 0
    masters = num_experts // num_ranks
    return _Sizes(num_ranks, masters, num_replica_slots, size, search, limit, thrifty)


def _empty_plan(sizes: _Sizes, all_slots: int, decision: torch.Tensor) -> DevicePlan:
    ranks, experts, device = sizes.num_ranks, sizes.num_experts, decision.device
    return DevicePlan(
        slot_expert=torch.empty((ranks, all_slots), dtype=torch.int32, device=device),
        quota=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        share=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        expert_load=torch.empty(experts, dtype=torch.int32, device=device),
        decision=decision,
        places=new_places(experts, ranks, device),
        sends=new_sends(ranks, all_slots, device),
    )


def _empty_attempts(sizes: _Sizes, device: torch.device | str) -> _Attempts:
    domains, number = sizes.num_domains, sizes.limit + sizes.thrifty
    held = torch.empty(
        (domains, number, sizes.num_slots, sizes.domain_size), dtype=torch.int32, device=device
    )
    return _Attempts(
        keys=torch.empty((domains, number + 2), dtype=torch.int64, device=device),
        held=held,
        quotas=torch.empty_like(held),
        reached=torch.empty((domains, number, 2), dtype=torch.int32, device=device),
        winners=torch.full((domains,), -1, dtype=torch.int32, device=device),
        turns=torch.zeros(COUNTERS, dtype=torch.int32, device=device),
    )


def _tables_of(follow_up: FollowUp) -> dict[str, Any]:
    """What ``stream`` is given, but for the plan."""
    tables = follow_up.tables
    return {
        "masters_ptr": tables.master_addresses,
        "pools_ptr": tables.pool_addresses,
        "regions_ptr": tables.region_offsets,
        "expert_bytes_ptr": tables.expert_bytes,
        "chunks_ptr": tables.chunks,
        "flags_ptr": tables.flag_addresses,
        "reported_ptr": follow_up.reported,
        "num_chunks": tables.chunks.shape[0],
        "max_chunks": tables.max_chunks,
        "patience_ns": follow_up.patience_ns,
    }


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
