"""plan: loads (R, E) of all ranks -> slot_expert, quota and this rank's share; the quota planner.

Five launches: the load of every expert; the first wave of attempts, one program each; the second
wave, whose programs return at once where the first reached the goal; the decision which attempt to
take, and whether it pays; one program per expert that writes the plan out. Twin:
``ultraep_serve.policies.quota.plan_quota``.
"""

from dataclasses import dataclass

import torch
import triton

from ultraep_kernels.device._finish import decide_kernel, finish_kernel
from ultraep_kernels.device._search import attempt_kernel, sum_kernel
from ultraep_kernels.plan import search_of

__all__ = ["DevicePlan", "Gate", "plan"]

_BLOCK_COLUMNS = 32  # experts per program of the sum
_BLOCK_MASTERS = 8  # of every rank, added at a time


@dataclass(frozen=True)
class Gate:
    """When a plan is followed; costs in picoseconds, as in ``ultraep_serve.costs``.

    The defaults follow every plan that lowers the load of the busiest rank.
    """

    max_imbalance: float = 1.0  # loads at or below this max/mean are left alone; in millionths
    per_assignment: int = 1
    per_expert_read: int = 0
    per_expert_sent: int = 0
    plan: int = 0


@dataclass(frozen=True)
class DevicePlan:
    """Where replicas go and how many assignments each rank computes; tensors on the device."""

    slot_expert: torch.Tensor  # (R, S) int32: logical expert in each slot, -1 empty
    quota: torch.Tensor  # (E, R) int32: assignments of expert e that rank r computes
    share: torch.Tensor  # (E, R) int32: this source rank's part of the quota
    expert_load: torch.Tensor  # (E,) int32: assignments of each expert over all ranks
    decision: torch.Tensor  # (1,) int32: number of an ultraep_serve.types.Decision


def plan(
    loads: torch.Tensor,
    num_replica_slots: int,
    source_rank: int,
    status: torch.Tensor,
    *,
    domain_size: int | None = None,
    gate: Gate | None = None,
    rows: torch.Tensor | None = None,
) -> DevicePlan:
    """Plan one layer of one batch: the same slots and quotas on every rank, as on CPU.

    Args:
        loads: int32 or int64 (R, E) on the device, rows may be apart; row r is what rank r's own
            tokens chose. E is a multiple of R.
        num_replica_slots: S, may be 0.
        source_rank: rank whose ``share`` is wanted.
        status: (1,) int32. Loads that are negative, or together more than 2**28, set
            IMPOSSIBLE_LOADS and give the identity.
        domain_size: copies stay within contiguous groups of this many ranks; None is all ranks.
        gate: where the plan does not pass it, the identity is written and the decision says why;
            None follows every plan.
        rows: (R, .) int32, all ranks' rows as ``row.write_row`` made them: rank 0's says whether
            to plan at all (its policy), and may set another threshold than the gate's. Where a
            rank saw unknown ids, checksums differ or ``status`` says that a wait was given up,
            the identity is written.
    """
    num_ranks, num_experts = loads.shape
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts = } must be a multiple of {num_ranks = }")
    if loads.stride(1) != 1:
        raise ValueError(f"{loads.stride() = }: experts must lie side by side")
    device = loads.device
    slots = num_replica_slots
    size = min(domain_size or num_ranks, num_ranks)
    num_masters = num_experts // num_ranks
    search = search_of(size, num_masters)
    limit = search.limit if slots and size > 1 else 0
    domains = triton.cdiv(num_ranks, size)
    keys = torch.empty((domains, limit + 2), dtype=torch.int64, device=device)
    held = torch.empty((domains, limit, slots, size), dtype=torch.int32, device=device)
    quotas = torch.empty_like(held)
    reached = torch.empty((domains, limit, 2), dtype=torch.int32, device=device)
    winners = torch.empty(domains, dtype=torch.int32, device=device)
    found = DevicePlan(
        slot_expert=torch.empty((num_ranks, slots), dtype=torch.int32, device=device),
        quota=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        share=torch.empty((num_experts, num_ranks), dtype=torch.int32, device=device),
        expert_load=torch.empty(num_experts, dtype=torch.int32, device=device),
        decision=torch.empty(1, dtype=torch.int32, device=device),
    )
    sum_kernel[(triton.cdiv(num_experts, _BLOCK_COLUMNS),)](
        loads,
        loads.stride(0),
        found.expert_load,
        NUM_RANKS=num_ranks,
        NUM_EXPERTS=num_experts,
        BLOCK_RANKS=_block(num_ranks),
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
        num_warps=4,
    )
    shape = {
        "NUM_RANKS": num_ranks,
        "NUM_MASTERS": num_masters,
        "DOMAIN_SIZE": size,
        "LIMIT": limit,
    }
    blocks = {
        "FIRST": search.first,
        "BLOCK_ALL_EXPERTS": _block(num_experts),
        "BLOCK_MASTERS": _BLOCK_MASTERS,
        "BLOCK_KEYS": _block(limit),
    }
    for wave in range(2 if limit else 0):
        attempt_kernel[(domains, limit - search.first if wave else search.first)](
            found.expert_load,
            keys,
            held,
            quotas,
            reached,
            **shape,
            **blocks,
            NUM_SLOTS=slots,
            GRAIN=search.grain,
            SWEEPS=search.sweeps,
            WAVE=wave,
            BLOCK_EXPERTS=_block(size * num_masters),
            BLOCK_RANKS=_block(size),
            BLOCK_SLOTS=triton.next_power_of_2(slots),
            num_warps=1,
        )
    limits = gate or Gate()
    decide_kernel[(1,)](
        found.expert_load,
        keys,
        reached,
        loads if rows is None else rows,
        0 if rows is None else rows.stride(0),
        winners,
        found.decision,
        status,
        round(limits.max_imbalance * 10**6),
        limits.per_assignment,
        limits.per_expert_read,
        limits.per_expert_sent,
        limits.plan,
        **shape,
        **blocks,
        HAS_ROWS=rows is not None,
        HAS_GATE=gate is not None,
        BLOCK_RANKS=_block(num_ranks),
        num_warps=1,
    )
    finish_kernel[(num_experts,)](
        loads,
        loads.stride(0),
        found.expert_load,
        winners,
        found.decision,
        held,
        quotas,
        found.slot_expert,
        found.quota,
        found.share,
        source_rank,
        **shape,
        NUM_SLOTS=slots,
        BLOCK_RANKS=_block(num_ranks),
        num_warps=1,
    )
    return found


def _block(size: int) -> int:
    """Width of a tile that one warp reduces in one instruction."""
    return max(32, int(triton.next_power_of_2(size)))
