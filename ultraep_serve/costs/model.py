"""What a MoE layer costs: seconds per assignment, bytes per expert, bandwidth, fixed costs.

A layer of one batch takes

    base + other * tokens of a rank
         + max over ranks of max(assignment * assignments, read * experts held)
         + [where loads are weighed] exchange
         + [where experts are copied] plan + exposed * transfer

The second line is a roofline: a rank computes its assignments, but no faster than it can read the
weights of the experts it holds. Predictions are floats; decisions are integers (``decide``).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ultraep_serve.errors import ConfigError

__all__ = ["PICOSECONDS", "CostModel", "IntegerCosts"]

PICOSECONDS = 10**12  # per second


@dataclass(frozen=True)
class IntegerCosts:
    """A cost model in whole picoseconds, so that every rank decides alike."""

    per_assignment: int
    per_expert_read: int
    per_expert_sent: int  # exposed part of one expert on the busiest link
    per_relay_hop: int
    exchange: int
    plan: int


@dataclass(frozen=True)
class CostModel:
    """Costs on one kind of rank. Raises ConfigError for values that cannot be."""

    seconds_per_assignment: (
        float  # compute and what of dispatch and combine grows with a rank's load
    )
    bytes_per_expert: int  # all of an expert's weights and scales
    link_bytes_per_second: float  # what one rank sends to others, achieved
    exchange_seconds: float = 0.0  # per layer that balancing looks at: count, exchange
    plan_seconds: float = 0.0  # per layer that is planned: plan, reroute, launches
    base_seconds: float = 0.0  # per MoE layer, whatever the load: launches
    other_seconds_per_token: float = (
        0.0  # per MoE layer and token of a rank: attention, shared expert
    )
    read_seconds_per_expert: float = 0.0  # reading one expert's weights from the rank's own memory
    exposed_fraction: float = 1.0  # of a transfer that nothing else hides
    relay_hop_seconds: float = 0.0  # until a relay has its first chunk and forwards it

    def __post_init__(self) -> None:
        for name in ("seconds_per_assignment", "bytes_per_expert", "link_bytes_per_second"):
            _require(name, getattr(self, name), zero_is_valid=False)
        for field in fields(self):
            _require(field.name, getattr(self, field.name), zero_is_valid=True)
        if self.exposed_fraction > 1:
            raise ConfigError(f"exposed_fraction = {self.exposed_fraction} must be 0 to 1")

    @property
    def seconds_per_sent_expert(self) -> float:
        """The exposed time of one expert on its sender's link."""
        return self.exposed_fraction * self.bytes_per_expert / self.link_bytes_per_second

    def integer_costs(self) -> IntegerCosts:
        """Rounded to picoseconds: half the error of the last digit, far below what is measured.

        Models fitted at run time differ between ranks: one rank's must be sent to all.
        """
        return IntegerCosts(
            per_assignment=max(1, _picoseconds(self.seconds_per_assignment)),
            per_expert_read=_picoseconds(self.read_seconds_per_expert),
            per_expert_sent=_picoseconds(self.seconds_per_sent_expert),
            per_relay_hop=_picoseconds(self.relay_hop_seconds),
            exchange=_picoseconds(self.exchange_seconds),
            plan=_picoseconds(self.plan_seconds),
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """Parse ``to_json``'s output. Raises ConfigError for unknown, missing or bad values."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the cost model is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError("the cost model must be a JSON object")
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "CostModel":
        """From names and values. Raises ConfigError as ``from_json``."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown costs {unknown}; choose from {sorted(known)}")
        needed = ("seconds_per_assignment", "bytes_per_expert", "link_bytes_per_second")
        if missing := [name for name in needed if name not in values]:
            raise ConfigError(f"the cost model must also have {missing}")
        return cls(**values)


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)


def _require(name: str, value: object, *, zero_is_valid: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name} = {value!r} must be a number")
    if value < 0 or (value == 0 and not zero_is_valid):
        valid = "0 or more" if zero_is_valid else "more than 0"
        raise ConfigError(f"{name} = {value!r} must be {valid}")
