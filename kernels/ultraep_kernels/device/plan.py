"""plan: loads (R, E) and speeds -> slot_expert, quota and this rank's share; the quota planner.

Five launches: the load of every expert; the first wave of attempts and the thrifty ones, one
program each; the second wave, whose programs return at once where the first reached the goal; the
decision which attempt to take, and whether it pays; one program per expert that writes the plan
out. Twin:
``host.plan.plan``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ultraep_kernels.contract import Search, search_of
from ultraep_kernels.device._plan_finish import decide_kernel, finish_kernel
from ultraep_kernels.device._plan_search import attempt_kernel, sum_kernel

__all__ = ["DevicePlan", "Gate", "plan"]

_BLOCK_COLUMNS = 32  # experts per program of the sum
_BLOCK_MASTERS = 8  # of every rank, added at a time


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


@dataclass(frozen=True)
class DevicePlan:
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert in each slot, -1 empty
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota
    expert_load: torch.Tensor  # (E,) int32: assignments of each expert over all ranks
    decision: torch.Tensor  # (1,) int32: number of a Decision


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
        rows: (R, .) int32, all ranks' rows as ``exchange.write_row`` made them: rank 0's says
            whether to plan at all (its policy), and may set another threshold than the gate's.
            Where a rank saw unknown ids, checksums differ or ``status`` says that a wait was given
            up, the identity is written.

    Raises:
        ValueError: E is no multiple of R, or a row's experts do not lie side by side.
    """
    sizes = _sizes_of(loads, num_replica_slots, domain_size)
    found, attempts = _empty_plan(sizes, loads.device), _empty_attempts(sizes, loads.device)
    _add_up(loads, sizes, found)
    _make_attempts(sizes, attempts, found, speeds)
    _decide(sizes, attempts, found, status, speeds, gate, rows)
    _finish(loads, source_rank, sizes, attempts, found)
    return found


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
        return int(triton.cdiv(self.num_ranks, self.domain_size))

    def shape(self) -> dict[str, int]:
        return {
            "NUM_RANKS": self.num_ranks,
            "NUM_MASTERS": self.num_masters,
            "DOMAIN_SIZE": self.domain_size,
            "LIMIT": self.limit,
            "THRIFTY": self.thrifty,
        }

    def blocks(self) -> dict[str, int]:
        """Of the kernels that look at a domain's attempts."""
        return {
            "FIRST": self.search.first,
            "BLOCK_ALL_EXPERTS": _block(self.num_experts),
            "BLOCK_MASTERS": _BLOCK_MASTERS,
            "BLOCK_KEYS": _block(self.limit),
        }


class _Attempts(NamedTuple):
    """What the attempts of every domain found; tensors on the device."""

    keys: torch.Tensor  # (domains, attempts + 2) int64: of each, of the identity, the goal
    held: torch.Tensor  # (domains, attempts, S, D) int32: logical experts in the slots
    quotas: torch.Tensor  # (domains, attempts, S, D) int32: what each of them computes
    reached: torch.Tensor  # (domains, attempts, 2) int32: busiest rank's time, most replicas on one
    winners: torch.Tensor  # (domains,) int32: the attempt to take, -1 the identity


def _sizes_of(loads: torch.Tensor, num_replica_slots: int, domain_size: int | None) -> _Sizes:
    num_ranks, num_experts = loads.shape
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    if loads.stride(1) != 1:
        raise ValueError(f"{loads.stride() = }: experts must lie side by side")
    size = min(domain_size or num_ranks, num_ranks)
    search = search_of(size, num_experts // num_ranks)
    limit, thrifty = search.limit, search.thrifty
    if num_replica_slots == 0 or size == 1:
        limit = thrifty = 0
    masters = num_experts // num_ranks
    return _Sizes(num_ranks, masters, num_replica_slots, size, search, limit, thrifty)


def _empty_plan(sizes: _Sizes, device: torch.device) -> DevicePlan:
    ranks, experts = sizes.num_ranks, sizes.num_experts
    return DevicePlan(
        slot_expert=torch.empty((ranks, sizes.num_slots), dtype=torch.int32, device=device),
        quota=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        share=torch.empty((experts, ranks), dtype=torch.int32, device=device),
        expert_load=torch.empty(experts, dtype=torch.int32, device=device),
        decision=torch.empty(1, dtype=torch.int32, device=device),
    )


def _empty_attempts(sizes: _Sizes, device: torch.device) -> _Attempts:
    domains, number = sizes.num_domains, sizes.limit + sizes.thrifty
    held = torch.empty(
        (domains, number, sizes.num_slots, sizes.domain_size), dtype=torch.int32, device=device
    )
    return _Attempts(
        keys=torch.empty((domains, number + 2), dtype=torch.int64, device=device),
        held=held,
        quotas=torch.empty_like(held),
        reached=torch.empty((domains, number, 2), dtype=torch.int32, device=device),
        winners=torch.empty(domains, dtype=torch.int32, device=device),
    )


def _add_up(loads: torch.Tensor, sizes: _Sizes, found: DevicePlan) -> None:
    """The load of every expert."""
    sum_kernel[(triton.cdiv(sizes.num_experts, _BLOCK_COLUMNS),)](
        loads,
        loads.stride(0),
        found.expert_load,
        NUM_RANKS=sizes.num_ranks,
        NUM_EXPERTS=sizes.num_experts,
        BLOCK_RANKS=_block(sizes.num_ranks),
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=4,
    )


def _make_attempts(
    sizes: _Sizes, attempts: _Attempts, found: DevicePlan, speeds: torch.Tensor | None
) -> None:
    """Both waves, and with the first the thrifty attempts; one program per attempt."""
    search = sizes.search
    for wave in range(2 if sizes.limit else 0):
        number = sizes.limit - search.first if wave else search.first + sizes.thrifty
        attempt_kernel[(sizes.num_domains, number)](
            found.expert_load,
            found.expert_load if speeds is None else speeds,
            attempts.keys,
            attempts.held,
            attempts.quotas,
            attempts.reached,
            **sizes.shape(),
            **sizes.blocks(),
            NUM_SLOTS=sizes.num_slots,
            GRAIN=search.grain,
            SWEEPS=search.sweeps,
            WAVE=wave,
            HAS_SPEEDS=speeds is not None,
            BLOCK_ALL_RANKS=_block(sizes.num_ranks),
            BLOCK_EXPERTS=_block(sizes.domain_size * sizes.num_masters),
            BLOCK_RANKS=_block(sizes.domain_size),
            BLOCK_SLOTS=triton.next_power_of_2(sizes.num_slots),
            num_warps=1,
        )


def _decide(
    sizes: _Sizes,
    attempts: _Attempts,
    found: DevicePlan,
    status: torch.Tensor,
    speeds: torch.Tensor | None,
    gate: Gate | None,
    rows: torch.Tensor | None,
) -> None:
    """Which attempt to take, and whether it pays."""
    limits = gate or Gate()
    decide_kernel[(1,)](
        found.expert_load,
        found.expert_load if speeds is None else speeds,
        attempts.keys,
        attempts.reached,
        found.expert_load if rows is None else rows,
        0 if rows is None else rows.stride(0),
        attempts.winners,
        found.decision,
        status,
        round(limits.max_imbalance * 10**6),
        limits.per_assignment,
        limits.per_expert_read,
        limits.per_expert_sent,
        **sizes.shape(),
        **sizes.blocks(),
        HAS_SPEEDS=speeds is not None,
        HAS_ROWS=rows is not None,
        HAS_GATE=gate is not None,
        BLOCK_RANKS=_block(sizes.num_ranks),
        num_warps=1,
    )


def _finish(
    loads: torch.Tensor, source_rank: int, sizes: _Sizes, attempts: _Attempts, found: DevicePlan
) -> None:
    """The plan in full, one program per expert."""
    finish_kernel[(sizes.num_experts,)](
        loads,
        loads.stride(0),
        found.expert_load,
        attempts.winners,
        found.decision,
        attempts.held,
        attempts.quotas,
        found.slot_expert,
        found.quota,
        found.share,
        source_rank,
        **sizes.shape(),
        NUM_SLOTS=sizes.num_slots,
        BLOCK_RANKS=_block(sizes.num_ranks),
        num_warps=1,
    )


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
