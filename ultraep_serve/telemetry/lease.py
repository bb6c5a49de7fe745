"""A policy that is in force for a while: it ends by itself, whatever becomes of whoever set it."""

import time
from dataclasses import dataclass

from ultraep_serve.types import Policy

__all__ = ["LONGEST_SECONDS", "Lease"]

LONGEST_SECONDS = 3600.0
_POLICIES: tuple[Policy, ...] = tuple(Policy)
_MILLISECOND = 10**6  # ns


@dataclass(frozen=True)
class Lease:
    """One lease. Policy and end are one 64-bit word, so that a rank never sees half a change."""

    number: int  # of this lease, drawn at random; less than 2**64
    policy: Policy
    ends_ms: int  # by the monotonic clock of the host
    holder: str = ""  # who asked for it, and when

    @classmethod
    def of(cls, number: int, policy: Policy, seconds: float, holder: str = "") -> "Lease":
        """A lease that begins at this moment."""
        return cls(number, policy, _now_ms() + round(seconds * 1000), holder)

    @property
    def word(self) -> int:
        """The end, then the policy's code + 1 in the last byte; 0 is no lease."""
        return self.ends_ms << 8 | (self.policy.code + 1)

    @classmethod
    def from_word(cls, word: int, number: int = 0, holder: str = "") -> "Lease | None":
        """The inverse of ``word``; None where it has ended, or where the word was damaged."""
        code, ends_ms = (word & 0xFF) - 1, word >> 8
        if not 0 <= code < len(_POLICIES):
            return None
        lease = cls(number, _POLICIES[code], ends_ms, holder)
        return lease if 0 < lease.seconds_left <= LONGEST_SECONDS else None

    @property
    def seconds_left(self) -> float:
        """Until it ends; negative afterwards."""
        return (self.ends_ms - _now_ms()) / 1000


def _now_ms() -> int:
    return time.monotonic_ns() // _MILLISECOND
