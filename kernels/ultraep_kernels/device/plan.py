"""plan: loads (R, E) and speeds -> slot_expert, quota and this rank's share; the quota planner.

One launch (``_plan_kernel``): the search, which ends early where a layer is left alone, what writes
the plan out, with all that stages after it need, and a look-up of ids. It may send and await
experts as well: a layer in which nothing is expected to be copied then takes no launch more. Twin:
``host.plan``.
"""

from typing import Any, NamedTuple

import torch
import triton

from ultraep_kernels.contract import MIN_FAN_OUT_SAVED, Prices, Search, search_of
from ultraep_kernels.device._plan_kernel import COUNTERS, plan_kernel
from ultraep_kernels.device._plan_residents import new_kept, new_states
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.launch import Launch
from ultraep_kernels.device.relays import Sends, least_saved, new_sends, relay_rule
from ultraep_kernels.device.reroute import AssignSizes, Places, new_places
from ultraep_kernels.device.stream import Programs, Reach, StreamSizes

__all__ = [
    "DevicePlan",
    "Gate",
    "Given",
    "PlanSizes",
    "Planner",
    "Rows",
    "Sender",
    "new_states",
    "plan_sizes",
]

_EXPERTS_SUMMED = 8  # by one program
_EXPERTS_WRITTEN = 8  # by one, in a layer in which nothing is expected to be copied
# of a thread; left to itself the assembler keeps to 168, and spills; where copies stay, all of them
_MOST_REGISTERS, _MOST_KEEPING = 192, 255
_TILE_IDS = 16  # compared with those of a block at a time, by a program of one warp
_BLOCK_WORDS = 1024  # of 4 bytes, per step of a copy by one
_BLOCK_FLAGS = 256  # looked at together
_CHANGING = (
    *("ids_ptr", "before_ptr", "out_ptr", "num_ids"),
    *("outcome_ptr", "state_ptr", "chunks_ptr", "patience_ns"),
)


class Rows(NamedTuple):
    """Integers of every rank, side by side in rows that may be apart."""

    table: torch.Tensor
    stride: int  # from one row to the next

    @classmethod
    def of(cls, table: torch.Tensor) -> "Rows":
        """A table (R, N). Raises ValueError where what is in a row does not lie side by side."""
        if table.stride(1) != 1:
            raise ValueError(f"{table.stride() = }: experts must lie side by side")
        return cls(table, table.stride(0))


class Gate(NamedTuple):
    """When a plan is followed; costs in picoseconds, as in ``ultraep_serve.costs``.

    Planning itself is no cost: it is spent by the time it could count.
    The defaults follow every plan that lowers the time of the busiest rank.
    """

    max_imbalance: int = 10**6  # loads at or below this max/mean, in millionths, are left alone
    per_assignment: int = 1
    per_read: int = 0  # of an expert
    per_sent: int = 0


class Given(NamedTuple):
    """What plans are made from; tensors on the device."""

    loads: Rows  # (R, E) int32: row r is what rank r's own tokens chose
    # Loads that are negative, together more than 2**28, or take a rank more time than 2**28
    # assignments at FULL_SPEED, set IMPOSSIBLE_LOADS and give the identity.
    status: torch.Tensor  # (1,) int32
    # (R, .) int32, all ranks' as ``exchange.fill_row`` made them: rank 0's says whether to plan at
    # all (its policy). Where a rank saw unknown ids, checksums differ or the status says that a
    # wait was given up, the identity is written.
    rows: Rows | None = None
    speeds: torch.Tensor | None = None  # (R,) int32, 1 to FULL_SPEED; None: see ``plan_sizes``
    # Where the plan does not pass it, the identity is written, and the decision says why.
    gate: Gate | None = None  # None: every plan is followed


class Sender(NamedTuple):
    """Whose tokens are rerouted, and whose sends are planned."""

    source: int  # the rank whose share is wanted
    rank: int = 0
    relay: str = "never"  # as for ``relays.plan_sends``, as is ``min_saved``
    epoch: torch.Tensor | None = None  # (2,) int64 as the exchange left it; None: no sends
    min_saved: int = MIN_FAN_OUT_SAVED


class DevicePlan(NamedTuple):
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert that each slot computes, -1 none
    copied: torch.Tensor  # (R, S) int32: the one that is copied into it in this batch, -1 none
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota
    expert_load: torch.Tensor  # (E,) int32: assignments of each expert over all ranks
    decision: torch.Tensor  # (1,) int32: number of a Decision
    places: Places  # of the share
    sends: Sends  # written where there is an epoch


class PlanSizes(NamedTuple):
    """What ``plan_kernel`` is compiled for."""

    num_ranks: int
    num_masters: int
    num_experts: int
    num_slots: int  # of a rank, planned for
    all_slots: int  # of a rank
    first_slot: int  # of those, from which ``num_slots`` are planned for
    domain_size: int
    num_domains: int
    search: Search  # without attempts where nothing can be copied
    num_attempts: int  # in each domain
    num_sums: int  # programs that add up loads
    num_finished: int  # programs that write the plan out
    block_all_experts: int
    block_all_ranks: int
    block_experts: int  # of a domain
    block_masters: int
    block_ranks: int  # of a domain
    block_slots: int
    block_keys: int
    block_places: int  # all slots
    keeps: bool = False  # whether copies stay, and are planned beside
    measures_speeds: bool = False  # by what ranks' rows say, unless speeds are given
    writes_identity: bool = True  # quotas, shares and places of a layer that is left alone too
    experts_summed: int = _EXPERTS_SUMMED
    masters_at_once: int = 8  # of every rank, added up together

    @property
    def num_programs(self) -> int:
        """Of a launch that does no more than plan."""
        attempts = self.num_domains * self.num_attempts
        return self.num_sums + int(self.keeps) + attempts + self.num_finished


class Attempts(NamedTuple):
    """What the attempts of every domain found; tensors on the device."""

    ranks: torch.Tensor  # (R, 2) int32: assignments to its masters, speed
    goal: torch.Tensor  # (1,) int64: a time
    keys: torch.Tensor  # (domains, attempts + 1) int64: of each, of the identity
    left: torch.Tensor  # (domains, attempts, D * L) int32: what masters still compute
    loads: torch.Tensor  # (domains, attempts, D) int32: of ranks, while they are levelled
    placed: torch.Tensor  # (domains, attempts, S, D, 2) int32: logical expert, what it computes
    reached: torch.Tensor  # (domains, attempts, 2) int32: busiest rank's time, most replicas on one
    winners: torch.Tensor  # (domains,) int32: the attempt to take, -1 the identity
    turns: torch.Tensor  # (COUNTERS,) int32, zero between launches: turns, then arrivals


class Planner:
    """Plans layer after layer: the same slots and quotas on every rank, as on CPU."""

    def __init__(
        self,
        sizes: PlanSizes,
        given: Given,
        sender: Sender,
        reach: Reach | None = None,
        programs: Programs | None = None,
        prices: Prices | None = None,
    ) -> None:
        """``reach`` and ``programs`` of a launch that sends and awaits experts too.

        ``prices``, of copies beside those that are there: where ``sizes`` say that copies stay.
        """
        self.sizes, device = sizes, given.status.device
        self.found = _empty_plan(sizes, device)
        self._attempts = _empty_attempts(sizes, device)
        self.speeds = self._attempts.ranks[:, 1]  # (R,) int32 that were planned with
        self._given, self._sender = given, sender
        layout = sizes.num_ranks, sizes.num_masters, sizes.all_slots
        search_steps = (sizes.num_ranks - 1).bit_length()
        num_places = sizes.num_ranks * sizes.all_slots
        self._constants: dict[str, Any] = {
            "given": given,
            "attempts": self._attempts,
            "found": self.found,
            "kept": None,
            "reach": None,
            "source": sender.source,
            "rank": sender.rank,
            "min_saved": least_saved(sender.relay, sender.min_saved, num_places),
            "epoch_ptr": sender.epoch,
            "SIZES": sizes,
            "RELAYS": relay_rule(*layout, sender.relay, sizes.domain_size),
            "ASSIGNS": AssignSizes(*layout, search_steps=search_steps, tile=_TILE_IDS),
            "STREAMS": None,
        }
        if given.rows is None:
            self._constants["outcome_ptr"] = None
        if sizes.keeps:
            experts = sizes.num_experts, sizes.num_ranks, sizes.num_slots
            self._constants["kept"] = new_kept(prices or Prices(), *experts, device)
        else:
            self._constants["state_ptr"] = None
        self._plan = self._launch(chunks_ptr=None, patience_ns=0)
        if reach is not None and programs is not None:
            programs = programs if sizes.all_slots else Programs(0, 0)
            self._num_copying = sum(programs) + max(1, sizes.all_slots)
            finishing = 1 + -(-sizes.num_experts // _EXPERTS_WRITTEN)
            copying = sizes._replace(num_finished=finishing)
            self._num_planning = copying.num_programs
            streams = StreamSizes(*layout, programs, block=_BLOCK_WORDS, block_flags=_BLOCK_FLAGS)
            self._plan_and_copy = self._launch(reach=reach, SIZES=copying, STREAMS=streams)

    def _launch(self, **others: Any) -> Launch:
        """A launch with ``others`` in place of some constants."""
        given = self._constants | others
        changing = tuple(name for name in _CHANGING if name not in given)
        most = _MOST_KEEPING if self.sizes.keeps else _MOST_REGISTERS
        return Launch(plan_kernel, changing, given, num_warps=1, maxnreg=most)

    def __call__(
        self,
        topk_ids: torch.Tensor,
        physical: torch.Tensor,
        counted: Count,
        outcome: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
        copied: tuple[torch.Tensor, int] | None = None,
    ) -> None:
        """Plan a layer, and write ``physical`` ids (T, K) for ``topk_ids`` (T, K).

        Both are contiguous and int32 or int64; ``counted`` has counted the latter last. What the
        host records is packed into ``outcome`` (``outcome_width``,) int32; None without rows.
        ``state`` is the layer's row of ``new_states``, where copies stay, which all ranks have
        alike; else None. The launch does also what ``Stream`` would do then for what is ``copied``,
        chunks of the layer, and waits for so many nanoseconds.
        """
        launch, programs = self._plan, self.sizes.num_programs
        given = [each for each in (outcome, state) if each is not None]
        if copied is not None:
            launch, programs = self._plan_and_copy, self._num_planning + self._num_copying
        ids = topk_ids, counted.before, physical, counted.num_ids
        launch(programs + counted.blocks, *ids, *given, *(copied or ()))


def plan_sizes(
    num_ranks: int,
    num_experts: int,
    num_replica_slots: int,
    domain_size: int | None = None,
    micro_batch: int = 0,
    num_micro_batches: int = 1,
    *,
    keeps: bool = False,
    **others: bool,
) -> PlanSizes:
    """For plans of R, E and S slots of a rank for each micro-batch; ``others`` of ``PlanSizes``.

    Copies may stay (``keeps``) where there are some.

    Copies stay within contiguous groups of ``domain_size`` ranks; None is all ranks. Raises
    ValueError where E is no multiple of R.
    """
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    size, masters = min(domain_size or num_ranks, num_ranks), num_experts // num_ranks
    search = search_of(size, masters)
    if num_replica_slots == 0 or size == 1:
        search = search._replace(limit=0, thrifty=0)
    return PlanSizes(
        num_ranks=num_ranks,
        num_masters=masters,
        num_experts=num_experts,
        num_slots=num_replica_slots,
        all_slots=num_replica_slots * num_micro_batches,
        first_slot=num_replica_slots * micro_batch,
        domain_size=size,
        num_domains=-(-num_ranks // size),
        search=search,
        num_attempts=search.limit + search.thrifty,
        num_sums=-(-num_experts // _EXPERTS_SUMMED),
        num_finished=1 + num_experts,
        block_all_experts=_block(num_experts),
        block_all_ranks=_block(num_ranks),
        block_experts=_block(size * masters),
        block_masters=_block(masters),
        block_ranks=_block(size),
        block_slots=int(triton.next_power_of_2(max(1, num_replica_slots))),
        block_keys=_block(search.limit),
        block_places=_block(num_ranks * num_replica_slots),
        keeps=keeps and search.limit > 0,
        **others,
    )


def _empty_plan(sizes: PlanSizes, device: torch.device) -> DevicePlan:
    ranks, experts, all_slots = sizes.num_ranks, sizes.num_experts, sizes.all_slots
    slots = [torch.empty((ranks, all_slots), dtype=torch.int32, device=device) for _ in range(2)]
    return DevicePlan(
        slot_expert=slots[0],
        copied=slots[int(sizes.keeps)],
        quota=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        share=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        expert_load=torch.empty(experts, dtype=torch.int32, device=device),
        decision=torch.zeros(1, dtype=torch.int32, device=device),
        places=new_places(experts, ranks, device),
        sends=new_sends(ranks, all_slots, device),
    )


def _empty_attempts(sizes: PlanSizes, device: torch.device) -> Attempts:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    of_attempts, size = (sizes.num_domains, sizes.num_attempts), sizes.domain_size
    return Attempts(
        ranks=empty(sizes.num_ranks, 2),
        goal=empty(1, dtype=torch.int64),
        keys=empty(sizes.num_domains, sizes.num_attempts + 1, dtype=torch.int64),
        left=empty(*of_attempts, size * sizes.num_masters),
        loads=empty(*of_attempts, size),
        placed=empty(*of_attempts, sizes.num_slots, size, 2),
        reached=empty(*of_attempts, 2),
        winners=empty(sizes.num_domains).fill_(-1),
        turns=empty(COUNTERS).zero_(),
    )


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
