"""relays: slot_expert (R, S) -> who sends each slot its weights, and what this rank has to send.

One program's work: a launch of its own, or a part of the launch that ends the plan. Twin of the
parents: ``host.relays.relay_parents``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import MAX_RELAYS, MIN_FAN_OUT_SAVED, MIN_RELAYED_REPLICAS

MOST_RELAYS = 512  # programs that relay, on one rank
_MAX_RELAYS = tl.constexpr(MAX_RELAYS)
_PAIRS = 2048  # of slots that are compared at a time; 64 by each thread of a warp


class Sends(NamedTuple):
    """The task list of one rank."""

    parents: torch.Tensor  # (R, S) int32: -1 the master, else ``rank * S + slot`` of a relay
    tasks: torch.Tensor  # (2, 1 + R * S) int32: number of slots to fill, then which; row 1 relayed
    turn: torch.Tensor  # (R * S,) int32, scratch
    forwarded: torch.Tensor  # (MOST_RELAYS,) int32: tasks that each relay is through with
    turns: torch.Tensor  # (2, 2) int32, zero between launches: turns, arrivals; of ``receive`` too
    # of the plan, which others overwrite while experts are still sent; written by ``plan`` alone
    decision: torch.Tensor  # (1,) int32
    epoch: torch.Tensor  # (1,) int64


class RelayRule(NamedTuple):
    """What ``assign_senders`` is compiled for."""

    num_ranks: int
    num_masters: int
    num_slots: int  # of a rank
    min_replicas: int  # from so many on an expert has relays; 0: none has
    block: int  # at least R * S
    block_ranks: int
    tile: int  # slots that all others are compared with at a time


@triton.jit
def assign_senders(
    slot_expert_ptr,  # (R * S,) int32
    sends,  # written, but for decision and epoch; ``turn``: earlier slots with the same expert
    rank,
    min_saved,  # relays are used where the busiest link carries so many fewer
    RULE: tl.constexpr,
):
    """Who sends what, by one program, and how many this rank does.

    What it reads, it or another launch has written.
    """
    NUM_RANKS: tl.constexpr = RULE.num_ranks
    NUM_SLOTS: tl.constexpr = RULE.num_slots
    count: tl.constexpr = NUM_RANKS * NUM_SLOTS
    places = tl.arange(0, RULE.block)
    expert = tl.load(slot_expert_ptr + places, mask=places < count, other=-1)
    owner = tl.maximum(expert, 0) // RULE.num_masters
    parent = tl.full((RULE.block,), -1, tl.int32)
    if RULE.min_replicas > 0:
        replicas = tl.full((RULE.block,), 0, tl.int32)
        turn = tl.full((RULE.block,), 0, tl.int32)
        for start in range(0, count, RULE.tile):
            others = start + tl.arange(0, RULE.tile)
            held = tl.load(slot_expert_ptr + others, mask=others < count, other=-2)
            same = held[:, None] == expert[None, :]
            before = same & (others[:, None] < places[None, :])
            replicas += tl.sum(same.to(tl.int32), axis=0)
            turn += tl.sum(before.to(tl.int32), axis=0)
        tl.store(sends.turn + places, turn, mask=places < count)
        tl.debug_barrier()
        relays = tl.full((RULE.block,), 1, tl.int32)
        for root in tl.static_range(2, _MAX_RELAYS + 1):
            relays += (replicas >= root * root).to(tl.int32)
        relays = tl.where(replicas >= RULE.min_replicas, relays, tl.maximum(replicas, 1))
        relayed = (expert >= 0) & (turn >= relays)
        wanted = turn % relays
        relay = tl.full((RULE.block,), 0, tl.int32)
        for start in range(0, count, RULE.tile):
            others = start + tl.arange(0, RULE.tile)
            held = tl.load(slot_expert_ptr + others, mask=others < count, other=-2)
            turns = tl.load(sends.turn + others, mask=others < count, other=-1)
            match = (held[:, None] == expert[None, :]) & (turns[:, None] == wanted[None, :])
            relay += tl.sum(tl.where(match, others[:, None], 0), axis=0)
        sender = tl.where(relayed, relay // NUM_SLOTS, owner)
        direct_sends = tl.histogram(owner, RULE.block_ranks, mask=expert >= 0)
        relayed_sends = tl.histogram(sender, RULE.block_ranks, mask=expert >= 0)
        received = tl.histogram(places // NUM_SLOTS, RULE.block_ranks, mask=expert >= 0)
        direct_link = tl.max(tl.maximum(direct_sends, received), axis=0)
        relayed_link = tl.max(tl.maximum(relayed_sends, received), axis=0)
        uses_relays = direct_link - relayed_link >= min_saved
        first_turn = tl.where(uses_relays, 0, count)  # turns lie below R * S
        parent = tl.where(relayed & (turn >= first_turn), relay, -1)
    tl.store(sends.parents + places, parent, mask=places < count)
    tl.debug_barrier()
    target = (places // NUM_SLOTS + rank) % NUM_RANKS  # so that ranks begin with different targets
    here = target * NUM_SLOTS + places % NUM_SLOTS
    expert = tl.load(slot_expert_ptr + here, mask=places < count, other=-1)
    parent = tl.load(sends.parents + here, mask=places < count, other=-1)
    owner = tl.maximum(expert, 0) // RULE.num_masters
    sender = tl.where(parent >= 0, parent // NUM_SLOTS, owner)
    for kind in tl.static_range(2):
        mine = (sender == rank) & (expert >= 0) & ((parent >= 0) == (kind == 1))
        position = tl.cumsum(mine.to(tl.int32), axis=0)
        row_ptr = sends.tasks + kind * (count + 1)
        tl.store(row_ptr + position, here, mask=mine)
        tl.store(row_ptr, tl.sum(mine.to(tl.int32), axis=0))
    return tl.sum(((sender == rank) & (expert >= 0)).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["min_saved"])
def _relays_kernel(slot_expert_ptr, sends, rank, min_saved, RULE: tl.constexpr):
    assign_senders(slot_expert_ptr, sends, rank, min_saved, RULE)


def new_sends(num_ranks: int, num_slots: int, device: torch.device | str) -> Sends:
    """To be written by ``assign_senders``."""
    count = num_ranks * num_slots
    return Sends(
        parents=torch.empty((num_ranks, num_slots), dtype=torch.int32, device=device),
        tasks=torch.empty((2, 1 + count), dtype=torch.int32, device=device),
        turn=torch.empty(count, dtype=torch.int32, device=device),
        forwarded=torch.zeros(MOST_RELAYS, dtype=torch.int32, device=device),
        turns=torch.zeros((2, 2), dtype=torch.int32, device=device),
        decision=torch.zeros(1, dtype=torch.int32, device=device),
        epoch=torch.zeros(1, dtype=torch.int64, device=device),
    )


def has_relays(mode: str, domain_size: int) -> bool:
    """Whether any plan for domains of so many ranks may; ``mode`` as for ``plan_sends``."""
    return mode != "never" and domain_size > _least_replicas(mode)  # one rank is the master's


def _least_replicas(mode: str) -> int:
    return 2 if mode == "always" else MIN_RELAYED_REPLICAS


def least_saved(mode: str, min_saved: int, num_places: int) -> int:
    """What ``assign_senders`` takes for ``mode`` and R * S slots."""
    return -num_places if mode == "always" else min_saved


def relay_rule(
    num_ranks: int, num_masters: int, num_slots: int, mode: str, domain_size: int
) -> RelayRule:
    """Of R ranks with L masters and S slots each; ``mode`` as for ``plan_sends``."""
    count = num_ranks * num_slots
    block = max(32, int(triton.next_power_of_2(count)))
    return RelayRule(
        num_ranks=num_ranks,
        num_masters=num_masters,
        num_slots=num_slots,
        min_replicas=_least_replicas(mode) if has_relays(mode, domain_size) else 0,
        block=block,
        block_ranks=max(32, int(triton.next_power_of_2(num_ranks))),
        tile=min(block, max(1, _PAIRS // block)),
    )


def plan_sends(
    slot_expert: torch.Tensor,
    num_masters: int,
    mode: str,
    domain_size: int,
    rank: int,
    min_saved: int = MIN_FAN_OUT_SAVED,
) -> Sends:
    """What ``rank`` sends, from the plan alone; twin of the parents ``host.relays.relay_parents``.

    ``slot_expert`` (R, S) int32 on the device, S at least 1; ``mode`` and ``min_saved`` as there.
    No expert has a replica outside its domain of ``domain_size`` ranks.
    """
    num_ranks, num_slots = slot_expert.shape
    sends = new_sends(num_ranks, num_slots, slot_expert.device)
    rule = relay_rule(num_ranks, num_masters, num_slots, mode, domain_size)
    saved = least_saved(mode, min_saved, slot_expert.numel())
    _relays_kernel[(1,)](slot_expert, sends, rank, saved, RULE=rule, num_warps=4)
    return sends
