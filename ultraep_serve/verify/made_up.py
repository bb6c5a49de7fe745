"""What the self-check computes with: made-up loads, contents of slots, and tokens."""

import numpy as np
import torch
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.balance.backend import Answers
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.types import IntArray
from ultraep_serve.verify.answers import using_copies

__all__ = ["NUM_LOADS", "SlotPatterns", "random_load", "random_tokens"]

NUM_LOADS = 64
_KINDS = 5  # of made-up loads
_TOKENS, _MOST_TOKENS = 1 << 8, 1 << 14  # of a rank
_ROWS = 4  # assignments of an expert in a batch whose answers are compared


class SlotPatterns:
    """Ways to fill slots, and the ids that use them."""

    def __init__(self, context: PlanContext) -> None:
        self._shape, self._domains = context.shape, context.domains

    @property
    def num_turns(self) -> int:
        """How many rotations have every expert copied once."""
        return -(-self._shape.num_masters // self._shape.num_slots)

    def rotated(self, turn: int) -> IntArray:
        """``slot_expert`` (R, S): slots hold experts of the next ranks of the domain, in turn."""
        shape, slot_expert = self._shape, self._nothing()
        for domain in self._domains:
            size = domain.stop - domain.start
            for rank in range(domain.start, domain.stop):
                for slot in range(min(shape.num_slots, shape.num_masters * (size - 1))):
                    ahead, local = divmod(slot, shape.num_masters)
                    owner = domain.start + (rank - domain.start + 1 + ahead) % size
                    local = (turn * shape.num_slots + local) % shape.num_masters
                    slot_expert[rank, slot] = owner * shape.num_masters + local
        return slot_expert

    def from_one_rank(self) -> IntArray:
        """``slot_expert`` (R, S): all ranks of a domain hold the experts of its first."""
        shape, slot_expert = self._shape, self._nothing()
        held = np.arange(min(shape.num_slots, shape.num_masters))
        for domain in self._domains:
            others = slice(domain.start + 1, domain.stop)
            slot_expert[others, : held.size] = domain.start * shape.num_masters + held
        return slot_expert

    def ids(self, logical: torch.Tensor, slot_expert: IntArray | None) -> torch.Tensor:
        """See ``using_copies``."""
        slots = None if slot_expert is None else torch.from_numpy(slot_expert).to(logical.device)
        return using_copies(logical, slots, self._shape)

    def _nothing(self) -> IntArray:
        return np.full((self._shape.num_ranks, self._shape.num_slots), -1, np.int32)


def random_load(context: PlanContext, number: int) -> tuple[PlanContext, list[torch.Tensor]]:
    """A context and every rank's ids (T, K) int32, the same on all ranks.

    In turn skewed, even, one hot expert, nearly all padding, nothing; every third with speeds that
    differ, the last skewed one of the largest batch.
    """
    shape, rng, kind = context.shape, np.random.default_rng(number), number % _KINDS
    experts, speeds = shape.num_logical_experts, None
    if number % 3 == 2:
        speeds = rng.integers(FULL_SPEED // 8, FULL_SPEED + 1, shape.num_ranks)
        speeds[rng.integers(shape.num_ranks)] = FULL_SPEED
    chances = rng.dirichlet(np.full(experts, 0.3)) if kind in (0, 3) else None
    num_tokens = _MOST_TOKENS if number == NUM_LOADS // _KINDS * _KINDS else _TOKENS
    ids = []
    for _ in range(shape.num_ranks):
        own = rng.choice(experts, (0 if kind == 4 else num_tokens, 2), p=chances)
        if kind == 2:
            own[:] = number % experts
        if kind == 3:
            own[rng.random(own.shape) < 0.9] = -1
        ids.append(torch.from_numpy(own.astype(np.int32)))
    return PlanContext.of(shape, context.domain_size, speeds), ids


def random_tokens(
    answers: Answers, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x (T, H) and weights (T, K); ids (T, K) int64 with equally many of each expert."""
    random = torch.Generator().manual_seed(answers.seed)
    num_tokens = -(-_ROWS * num_experts // answers.experts_per_token)
    x = torch.randn(num_tokens, answers.hidden_size, generator=random).to(answers.dtype)
    weights = torch.rand(num_tokens, answers.experts_per_token, generator=random) + 0.5
    weights /= weights.sum(dim=1, keepdim=True)
    ids = torch.arange(num_tokens * answers.experts_per_token) % num_experts
    return (
        x.to(answers.device),
        weights.to(answers.device),
        ids.view(num_tokens, -1).to(answers.device),
    )
