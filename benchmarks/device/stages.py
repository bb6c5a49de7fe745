"""Our stages on virtual ranks: what they make of one batch, and how long each of them takes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench import PATIENCE_NS, Bench
from exchange import exchange_microseconds
from report import require_equal, require_ok
from routes import Routes
from stream import require_arrived, sender, sends_of
from ultraep_kernels.device.count import Counted, count
from ultraep_kernels.device.plan import DevicePlan, plan
from ultraep_kernels.device.relays import Sends, plan_sends
from ultraep_kernels.device.reroute import reroute
from ultraep_kernels.device.status import new_status
from ultraep_kernels.device.stream import stream, wait_slots

from tests.support.virtual_ranks import VirtualRanks
from ultraep_serve.offline.hardware import Efficiency, hardware

__all__ = ["Balanced", "balance", "over_link", "own_times"]

LINK = "h100"  # whose NVLink is assumed
RELAY = "auto"


@dataclass(frozen=True)
class Balanced:
    """What the stages of all ranks made of one batch."""

    counted: list[Counted]  # by rank
    plans: list[DevicePlan]  # by rank
    sends: list[Sends]  # by rank
    physical: torch.Tensor  # (R * T, K) int32
    epoch: torch.Tensor
    status: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        """(R, S) int32: the expert in each slot."""
        return self.plans[0].slot_expert

    @property
    def busiest(self) -> int:
        """The rank that sends most."""
        counts = [int(send.tasks[:, 0].sum()) for send in self.sends]
        return counts.index(max(counts))


def balance(bench: Bench, ranks: VirtualRanks, routes: Routes) -> Balanced:
    """All ranks' stages, rank by rank; slots are filled and checked."""
    shape, status = routes.shape, new_status(bench.device)
    counted = [count(ids, shape.num_logical_experts) for ids in routes.ids]
    loads = torch.stack([own.load for own in counted])
    require_equal(loads, routes.loads, "loads")
    numbers = range(shape.num_ranks)
    plans = [plan(loads, shape.num_replica_slots, rank, status) for rank in numbers]
    slots = plans[0].slot_expert
    for found in plans[1:]:
        require_equal(found.slot_expert, slots, "another rank's plan")
        require_equal(found.quota, plans[0].quota, "another rank's quota")
    physical = torch.cat(
        [
            reroute(*given, found.share, slots, shape.num_masters, status)
            for *given, found in zip(routes.ids, counted, plans, strict=True)
        ]
    )
    homes = torch.arange(shape.num_logical_experts, device=bench.device)
    held = torch.cat([homes.view(shape.num_ranks, -1), slots.long()], dim=1).view(-1)
    require_equal(held[physical.long()], routes.ids.view(physical.shape), "the experts asked for")
    ranks.flags.zero_()  # of the batch before
    epoch, sends = torch.tensor([1, 0], device=bench.device), sends_of(ranks, slots, RELAY)
    sender(bench, ranks, slots, sends, epoch, status)()
    require_arrived(ranks, slots, epoch, status)
    return Balanced(counted, plans, sends, physical, epoch, status)


def own_times(
    bench: Bench, ranks: VirtualRanks, routes: Routes, balanced: Balanced
) -> dict[str, float | None]:
    """Microseconds of every stage of ours, the exchange with its row."""
    shape, slots, status = routes.shape, balanced.slots, balanced.status
    masters, num_slots = shape.num_masters, shape.num_replica_slots
    ids, counted, share = routes.ids[0], balanced.counted[0], balanced.plans[0].share
    loads = torch.stack([own.load for own in balanced.counted])
    busiest, programs = balanced.busiest, max(1, bench.num_programs // 2)
    push = balanced.sends[busiest], slots, masters, ranks.tables[busiest], busiest
    signals = balanced.epoch, status, PATIENCE_NS
    stages: dict[str, Callable[[], object]] = {
        "count": lambda: count(ids, shape.num_logical_experts),
        "plan": lambda: plan(loads, num_slots, 0, status),
        "sends": lambda: plan_sends(slots, masters, 0, RELAY, shape.num_ranks),
        "replicate": lambda: stream(*push, *signals, num_programs=programs),
        "reroute": lambda: reroute(ids, counted, share, slots, masters, status),
        "wait": lambda: wait_slots(slots, ranks.tables[0], 0, *signals),
    }
    times = {name: bench.replayed(stage)[1] for name, stage in stages.items()}
    require_ok(status)
    times["exchange"] = exchange_microseconds(bench, shape.num_ranks, shape.num_logical_experts)
    return times


def over_link(ranks: VirtualRanks, balanced: Balanced) -> float:
    """Microseconds that the busiest link is assumed to take for its experts."""
    sent = int(balanced.sends[balanced.busiest].tasks[:, 0].sum())
    received = int((balanced.slots >= 0).sum(1).max())
    expert_bytes = sum(tensor.shape[1] for tensor in ranks.experts[0])
    rate = hardware(LINK).link_bytes_per_second * Efficiency().link
    return 1e6 * max(sent, received) * expert_bytes / rate
