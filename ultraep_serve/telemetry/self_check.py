"""What the self-check at start has found on one rank, as the ring's header carries it."""

import json
from dataclasses import asdict, dataclass
from enum import Enum

from ultraep_serve.types import CheckResult

__all__ = ["SelfCheck", "SelfCheckOutcome"]

_DETAIL = 240  # characters of a check's texts, fewer where all together have no room


class SelfCheckOutcome(str, Enum):
    """How the self-check ended."""

    PASSED = "passed"
    OFF = "off"  # nothing but costs and experts was looked at
    FAILED = "failed"  # the last of its checks has


@dataclass(frozen=True)
class SelfCheck:
    """How the self-check ended, and what each check of it has found."""

    outcome: SelfCheckOutcome
    checks: tuple[CheckResult, ...] = ()

    @property
    def seconds(self) -> float:
        """What all checks took together."""
        return sum(check.seconds for check in self.checks)

    def to_json(self, max_bytes: int) -> str:
        """One line of ASCII, at most ``max_bytes`` long; long texts are cut."""
        most = _DETAIL
        while len(text := self._to_json(most)) > max_bytes and most:
            most //= 2
        return text

    def _to_json(self, most: int) -> str:
        checks = [
            asdict(check)
            | {
                "seconds": round(check.seconds, 6),
                "detail": check.detail[:most],
                "warning": check.warning[:most],
            }
            for check in self.checks
        ]
        return json.dumps([self.outcome.value, checks])

    @classmethod
    def from_json(cls, text: str) -> "SelfCheck | None":
        """The inverse of ``to_json``; None where ``text`` is empty or damaged."""
        try:
            outcome, checks = json.loads(text)
            return cls(SelfCheckOutcome(outcome), tuple(CheckResult(**check) for check in checks))
        except (ValueError, TypeError, RecursionError):
            return None
