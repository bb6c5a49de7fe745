"""A MoE layer on virtual ranks: real weights and tokens, and what all ranks' stages make of them.

GEMMs are ``torch._grouped_mm`` over the L + S experts of a rank; dispatch and combine are left out:
rows lie sorted by expert when a rank starts.

Shape letters: R ranks, E logical experts, L masters and S slots per rank, H hidden, I inner,
T tokens of a rank, K experts per token, N assignments of all ranks' tokens, M those that one rank
computes.
"""

from dataclasses import dataclass

import torch
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.plan import DevicePlan
from ultraep_kernels.device.relays import Sends

from tests.support.bench import Bench
from tests.support.kernel_checks import count_of, plan, require_equal
from tests.support.reroute_alone import reroute
from tests.support.virtual_ranks import VirtualRanks, make_ranks, require_arrived, sender, sends_of
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES
from ultraep_serve.types import ExpertShape

RELAY = "auto"
LARGEST_ERROR = 2e-2  # relative, of bfloat16 against float64


@dataclass(frozen=True)
class Balanced:
    """What the stages of all ranks made of one batch."""

    counted: list[Count]  # by rank
    plans: list[DevicePlan]  # by rank
    sends: list[Sends]  # by rank
    physical: torch.Tensor  # (R * T, K) int32

    @property
    def loads(self) -> torch.Tensor:
        """(R, E) int32: what each rank's tokens chose."""
        return torch.stack([own.load for own in self.counted])

    @property
    def slots(self) -> torch.Tensor:
        """(R, S) int32: the expert in each slot."""
        return self.plans[0].slot_expert

    @property
    def busiest(self) -> int:
        """The rank that sends most."""
        counts = [int(send.tasks[:, 0].sum()) for send in self.sends]
        return counts.index(max(counts))


def balance(bench: Bench, ranks: VirtualRanks, ids: torch.Tensor) -> Balanced:
    """All ranks' stages for logical ``ids`` (R, T, K), rank by rank; slots are filled.

    AssertionError where plans differ, an id is rerouted to another expert, or a slot is wrong.
    """
    shape, status = ranks.shape, ranks.reach.status
    counted = [count_of(own, shape.num_logical_experts) for own in ids]
    for count, own in zip(counted, ids, strict=True):
        count(own)
    loads = torch.stack([own.load for own in counted])
    numbers = range(shape.num_ranks)
    plans = [plan(loads, shape.num_replica_slots, rank, status) for rank in numbers]
    slots = plans[0].slot_expert
    for found in plans[1:]:
        require_equal(found.slot_expert, slots, "another rank's plan")
        require_equal(found.quota, plans[0].quota, "another rank's quota")
    physical = torch.cat(
        [
            reroute(own, found.places, shape.num_slots, of_own, status)
            for own, of_own, found in zip(ids, counted, plans, strict=True)
        ]
    )
    homes = torch.arange(shape.num_logical_experts, device=bench.device)
    held = torch.cat([homes.view(shape.num_ranks, -1), slots.long()], dim=1).view(-1)
    require_equal(held[physical.long()], ids.view(physical.shape), "the expert computed")
    ranks.empty_slots()
    ranks.flags.zero_()  # of the batch before
    sends = sends_of(ranks, slots, RELAY)
    for send in sends:
        send.epoch.fill_(1)
    sender(bench, ranks, slots, sends)()
    require_arrived(ranks, slots, sends[0].epoch)
    return Balanced(counted, plans, sends, physical)


@dataclass(frozen=True)
class Work:
    """Which assignments each rank computes, in the order of its experts."""

    assignments: torch.Tensor  # (N,) int64 by physical expert: token * K + k over all ranks' tokens
    counts: torch.Tensor  # (R, L + S) int64 on the host: assignments of each physical expert

    @classmethod
    def of(cls, physical: torch.Tensor, shape: ExpertShape) -> "Work":
        """Of ``physical`` ids (R * T, K) without padding."""
        flat = physical.reshape(-1).long()
        places = shape.num_ranks * shape.num_local
        counts = torch.bincount(flat, minlength=places).view(-1, shape.num_local).cpu()
        return cls(flat.argsort(stable=True), counts)

    def of_rank(self, rank: int) -> torch.Tensor:
        """(M,) of ``assignments``."""
        ends = self.counts.sum(1).cumsum(0).tolist()
        return self.assignments[ends[rank - 1] if rank else 0 : ends[rank]]


@dataclass(frozen=True)
class MoELayer:
    """Weights of all experts, slots behind them, and the hidden states of all ranks' tokens."""

    ranks: VirtualRanks
    x: torch.Tensor  # (R * T, H) bfloat16
    top_k: int
    inner: int

    def weights(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate with up (L + S, 2 * I, H), and down (L + S, H, I), masters first; bfloat16."""
        local, hidden = self.ranks.shape.num_local, self.x.shape[1]
        gate_up, down = (tensor.view(torch.bfloat16) for tensor in self.ranks.experts[rank])
        return gate_up.view(local, 2 * self.inner, hidden), down.view(local, hidden, self.inner)

    def inputs(self, work: Work, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What dispatch would have brought to a rank: rows (M, H) by expert, their ends (L + S,)"""
        ends = work.counts[rank].cumsum(0).int().to(self.x.device)
        return self.x[work.of_rank(rank) // self.top_k], ends

    def outputs(self, work: Work, tokens: torch.Tensor) -> torch.Tensor:
        """What all ranks compute for ``tokens`` (n,): (n, K, H), NaN where nobody did."""
        device = self.x.device
        place = torch.full((self.x.shape[0],), -1, device=device)
        place[tokens] = torch.arange(tokens.numel(), device=device)
        shape = (tokens.numel(), self.top_k, self.x.shape[1])
        out = torch.full(shape, torch.nan, dtype=self.x.dtype, device=device)
        for rank in range(self.ranks.shape.num_ranks):
            assignments = work.of_rank(rank)
            rows, ends = self.inputs(work, rank)
            computed = compute(rows, ends, *self.weights(rank))
            places = place[assignments // self.top_k]
            wanted = places >= 0
            out[places[wanted], assignments[wanted] % self.top_k] = computed[wanted]
        return out

    def reference(self, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """``outputs`` in float64, by the masters of logical ``ids`` (n, K)."""
        masters = self.ranks.shape.num_masters
        out = torch.zeros((*ids.shape, self.x.shape[1]), dtype=torch.float64, device=ids.device)
        for expert in ids.unique().tolist():
            gate_up, down = (w[expert % masters].double() for w in self.weights(expert // masters))
            token, choice = torch.nonzero(ids == expert, as_tuple=True)
            gate, up = (self.x[tokens[token]].double() @ gate_up.T).chunk(2, dim=-1)
            out[token, choice] = (torch.nn.functional.silu(gate) * up) @ down.T
        return out


def compute(
    rows: torch.Tensor, ends: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The expert kernel: ``rows`` (M, H) by local expert, which end at ``ends``, to (M, H)."""
    if not rows.shape[0]:
        return rows
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    return torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)


def make_layer(
    shape: ExpertShape, hidden: int, inner: int, tokens: int, top_k: int, device: torch.device
) -> MoELayer:
    """Random weights and hidden states of ``tokens`` per rank; outputs are about as large as them.

    Slots hold NaN.
    """
    generator = torch.Generator(device).manual_seed(0)
    tensor_bytes = (2 * inner * hidden * 2, hidden * inner * 2)
    ranks = make_ranks(shape, tensor_bytes, MOST_CHUNK_BYTES, device)
    states = (shape.num_ranks * tokens, hidden)
    x = torch.empty(states, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    layer = MoELayer(ranks, x, top_k, inner)
    for rank in range(shape.num_ranks):
        for weight in layer.weights(rank):
            deviation = weight.shape[2] ** -0.5
            weight[: shape.num_masters].normal_(0.0, deviation, generator=generator)
    ranks.empty_slots()
    return layer


def check_outputs(
    layer: MoELayer, ids: torch.Tensor, off: Work, balanced: Work, samples: int
) -> dict[str, float | bool]:
    """How far the outputs of some tokens lie apart; AssertionError where too far.

    ``ids`` (R * T, K) logical; ``samples`` of the tokens are compared, from the first to the last.
    """
    steps = torch.arange(samples, device=ids.device)
    tokens = steps * (ids.shape[0] - 1) // (samples - 1)
    unbalanced, rerouted = (layer.outputs(work, tokens) for work in (off, balanced))
    exact = layer.reference(ids[tokens], tokens)
    errors = {
        "largest_error_off": _largest_error(unbalanced, exact),
        "largest_error_balanced": _largest_error(rerouted, exact),
        "largest_difference": _largest_error(rerouted, unbalanced),
    }
    for name, error in errors.items():
        assert error <= LARGEST_ERROR, f"{name} {error:.1e}"  # false for NaN
    return {**errors, "bitwise_equal": torch.equal(unbalanced, rerouted)}


def _largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, of the output (n, K, H) of the assignment that is furthest off."""
    apart = (found.double() - expected.double()).norm(dim=-1)
    return float((apart / expected.double().norm(dim=-1)).max())
