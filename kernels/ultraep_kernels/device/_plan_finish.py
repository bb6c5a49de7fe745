"""The planner's end: the plan in full, and what other kernels and the host need of it.

One program writes what is in every slot, who sends it (``relays``) and what the host learns
(``outcome``); the others write, of every expert, quotas, shares and where the shares' places lie
(``reroute``). Where nothing is copied the latter may have nothing to do. Twin of the shares:
``host._plan_share``.
"""

import triton
import triton.language as tl

from ultraep_kernels.device._plan_residents import RESIDENTS
from ultraep_kernels.device.outcome import SENT, store_outcome
from ultraep_kernels.device.relays import assign_senders
from ultraep_kernels.device.reroute import every_32nd, store_places
from ultraep_kernels.device.status import PLANNED


@triton.jit
def finish(
    program,  # 0, or of those that write experts
    decision,
    given,
    made,  # Attempts; Kept and the layer's state where copies stay, else None
    found,
    sender,  # the source whose share it is; rank, ``min_saved`` and epoch of the sends
    outcome_ptr,
    SIZES: tl.constexpr,
    RELAYS: tl.constexpr,
):
    """A program writes slots, or what there is of its experts."""
    if program == 0:
        _finish_slots(decision, given, made, found, sender, outcome_ptr, SIZES, RELAYS)
    else:
        if (decision == PLANNED) | SIZES.writes_identity:
            for expert in range(program - 1, SIZES.num_experts, SIZES.num_finished - 1):
                _finish_expert(expert, decision, given, made, found, sender[0], SIZES)


@triton.jit
def _finish_slots(
    decision, given, made, found, sender, outcome_ptr, SIZES: tl.constexpr, RELAYS: tl.constexpr
):
    """What every slot computes, what is copied into it and by whom, and what the host learns."""
    attempts, kept, state_ptr = made
    source, rank, min_saved, epoch_ptr = sender
    places = tl.arange(0, RELAYS.block)
    exists = places < SIZES.num_ranks * SIZES.all_slots
    of_rank: tl.constexpr = SIZES.all_slots if SIZES.all_slots > 0 else 1
    holder = places // of_rank
    slot = places % of_rank - SIZES.first_slot
    domain = holder // SIZES.domain_size
    if kept is None:
        winner = tl.load(attempts.winners + domain, mask=exists, other=-1)
        winner = tl.where(decision == PLANNED, winner, -1)
        planned = (winner >= 0) & (slot >= 0) & (slot < SIZES.num_slots)
        offsets = domain * SIZES.num_attempts + winner
        offsets = (offsets.to(tl.int64) * SIZES.num_slots + slot) * SIZES.domain_size
        offsets += holder - domain * SIZES.domain_size
        held = tl.load(attempts.placed + offsets * 2, mask=planned, other=-1)
        amount = tl.load(attempts.placed + offsets * 2 + 1, mask=planned & (held >= 0), other=0)
        copied = held
    else:
        planned = places < tl.where(decision == PLANNED, SIZES.num_ranks * SIZES.all_slots, 0)
        planned = planned & (slot >= 0) & (slot < SIZES.num_slots)
        offsets = slot * SIZES.num_ranks + holder
        held = tl.load(kept.placed + offsets * 2, mask=planned, other=-1)
        amount = tl.load(kept.placed + offsets * 2 + 1, mask=planned, other=0)
        before = tl.load(state_ptr + RESIDENTS + offsets, mask=planned, other=-1)
        copied = tl.where(held != before.to(tl.int32), held, -1)
        tl.store(state_ptr + RESIDENTS + offsets, held.to(tl.int64), mask=planned)
        tl.store(found.copied + places, copied, mask=exists)
        held = tl.where(amount > 0, held, -1)
    tl.store(found.slot_expert + places, held, mask=exists)
    if outcome_ptr is not None:
        own = given.loads.table + source.to(tl.int64) * given.loads.stride
        known = given, attempts, found
        slots = held, amount, copied
        store_outcome(decision, known, own, slots, outcome_ptr, SIZES, RELAYS.block)
    sent = 0
    HAS_SENDS: tl.constexpr = SIZES.all_slots > 0 if epoch_ptr is not None else False
    if HAS_SENDS:
        sends = found.sends
        tl.store(sends.decision, decision)
        tl.store(sends.epoch, tl.load(epoch_ptr))
        if decision == PLANNED:
            tl.debug_barrier()  # slots are read as others of the program wrote them
            sent = assign_senders(found.copied, sends, rank, min_saved, RELAYS)
        else:
            tl.store(sends.tasks, 0)
            tl.store(sends.tasks + SIZES.num_ranks * SIZES.all_slots + 1, 0)
    if outcome_ptr is not None:
        tl.store(outcome_ptr + SENT, sent)


@triton.jit
def _finish_expert(expert, decision, given, made, found, source, SIZES: tl.constexpr):
    """Quota, share and places of an expert."""
    attempts, kept, _ = made
    NUM_RANKS: tl.constexpr = SIZES.num_ranks
    DOMAIN_SIZE: tl.constexpr = SIZES.domain_size
    ranks = every_32nd(SIZES.block_all_ranks)
    exists = ranks < NUM_RANKS
    owner = expert // SIZES.num_masters
    domain = owner // DOMAIN_SIZE
    STEP: tl.constexpr = DOMAIN_SIZE if kept is None else NUM_RANKS
    if kept is None:
        winner = tl.where(decision == PLANNED, tl.load(attempts.winners + domain), -1)
        local = tl.where(winner >= 0, ranks - domain * DOMAIN_SIZE, -1)
        inside = exists & (local >= 0) & (local < DOMAIN_SIZE)
        start = (domain * SIZES.num_attempts + winner).to(tl.int64)
        pair_ptr = attempts.placed + (start * (SIZES.num_slots * DOMAIN_SIZE) + local) * 2
    else:
        inside = ranks < tl.where(decision == PLANNED, NUM_RANKS, 0)
        pair_ptr = kept.placed + ranks * 2
    first = ranks * (SIZES.num_masters + SIZES.all_slots)  # physical experts of each rank
    physical = tl.where(ranks == owner, first + expert % SIZES.num_masters, -1)
    quota = ranks * 0
    NUM_SLOTS: tl.constexpr = SIZES.num_slots
    for slot in tl.static_range(NUM_SLOTS):
        held = tl.load(pair_ptr + slot * (STEP * 2), mask=inside, other=-1)
        amount = tl.load(pair_ptr + slot * (STEP * 2) + 1, mask=inside, other=0)
        quota += tl.where(held == expert, amount, 0)
        here = first + (SIZES.num_masters + SIZES.first_slot + slot)
        physical = tl.where(held == expert, here, physical)
    rest = tl.maximum(tl.load(found.expert_load + expert), 0) - tl.sum(quota, axis=0)
    quota += tl.where(ranks == owner, rest, 0)
    column_ptr = given.loads.table + ranks.to(tl.int64) * given.loads.stride + expert
    loads = tl.load(column_ptr, mask=exists, other=0)
    share = _share(loads, quota, expert, source, NUM_RANKS, SIZES.block_all_ranks)
    at_home = tl.where(ranks == owner, tl.sum(tl.where(ranks == source, loads, 0), axis=0), 0)
    share = tl.where(decision == PLANNED, share, at_home)
    tl.store(found.quota + expert * NUM_RANKS + ranks, quota, mask=exists)
    tl.store(found.share + expert * NUM_RANKS + ranks, share, mask=exists)
    store_places(expert, share, physical, found.places, NUM_RANKS, SIZES.block_all_ranks)


@triton.jit
def _share(loads, quota, expert, source, NUM_RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """(R,): what ``source`` sends where of an expert; twin in ``host._plan_share``."""
    ranks = every_32nd(BLOCK_RANKS)
    first = expert % NUM_RANKS
    turn = (ranks - first + NUM_RANKS) % NUM_RANKS
    source_turn = (source - first + NUM_RANKS) % NUM_RANKS
    is_source = ranks == source
    home = tl.sum(tl.where(is_source, tl.minimum(loads, quota), 0), axis=0)
    ahead = (ranks < NUM_RANKS) & (turn < source_turn)
    start = tl.sum(tl.where(ahead, tl.maximum(loads - quota, 0), 0), axis=0)
    end = start + tl.sum(tl.where(is_source, loads, 0), axis=0) - home
    demand = tl.maximum(quota - loads, 0)
    position = tl.cumsum(demand, axis=0) - demand
    overlap = tl.minimum(end, position + demand) - tl.maximum(start, position)
    return tl.maximum(overlap, 0) + tl.where(is_source, home, 0)
