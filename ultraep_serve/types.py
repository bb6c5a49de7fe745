"""The data classes that packages pass to each other.

Shape letters: R ranks, E logical experts, S replica slots per rank, L = E / R masters per rank,
T tokens of a batch, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from ultraep_kernels.contract import Decision, IntArray, Outcome, Plan, Policy, Stage

__all__ = [
    "CheckResult",
    "Decision",
    "ExpertShape",
    "IntArray",
    "Outcome",
    "Plan",
    "Policy",
    "Stage",
    "TokenView",
    "VerificationCheck",
    "parse_speeds",
]


class TokenView(Enum):
    """Which tokens a rank sees."""

    SHARED = "tensor"  # every rank sees the same tokens (tensor parallel)
    OWN = "data"  # every rank sees its own (data parallel)


class VerificationCheck(IntEnum):
    """What is checked of a layer while it serves; the index of the counts in a ring's header."""

    ASSIGNMENTS = 0  # each is computed once, by a physical expert of its logical one
    SLOTS = 1  # bytes of slots are those of their masters
    PLANS = 2  # all ranks have made the same plan
    ANSWERS = 3  # a few tokens have the outputs that masters alone give them


@dataclass(frozen=True)
class CheckResult:
    """One check of the self-check at start."""

    name: str
    seconds: float
    detail: str  # what was checked; where it failed, what was found
    warning: str = ""  # what the operator should look at, though it passed


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of an expert-parallel group."""

    num_ranks: int  # R
    num_logical_experts: int  # E, a multiple of R
    num_replica_slots: int  # S
    num_micro_batches: int = 1  # of a forward pass, that overlap: each has S slots of its own

    @property
    def num_masters(self) -> int:
        """L: home copies per rank."""
        return self.num_logical_experts // self.num_ranks

    @property
    def num_slots(self) -> int:
        """Slots per rank, those of all micro-batches."""
        return self.num_micro_batches * self.num_replica_slots

    @property
    def num_local(self) -> int:
        """Physical experts per rank: L + S, with overlapping micro-batches more slots."""
        return self.num_masters + self.num_slots


def parse_speeds(text: str, words: Sequence[str] = ("auto", "equal")) -> tuple[float, ...]:
    """Numbers of a setting like "1.0,0.6"; none for one of ``words``. Raises ValueError."""
    if text in words:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (0.0,)
    if not all(0 < value <= 1 for value in values):
        raise ValueError(
            f"{text!r} must be {' or '.join(words)}, or one number per rank like 1.0,0.6, each "
            "above 0 and at most 1"
        )
    return values
