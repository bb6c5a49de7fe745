"""What a MoE layer costs, and when moving weights pays.

A layer of one batch takes

    base + max over ranks of max(assignment * assignments, read * experts held)
         + [where loads are exchanged] exchange
         + [where experts are copied] plan + exposed * transfer

The first line is a roofline: a rank computes its assignments, but no faster than it can read the
weights of the experts it holds. Predictions are floats. Decisions are integers, picoseconds, which
neither round nor overflow: from loads and plan alone every rank decides alike.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import parse_object, read_text
from ultraep_serve.types import ExpertShape, IntArray

_PICOSECONDS = 10**12  # per second
_MOST = 1e18
_MOST_SECONDS = 1000  # decisions are computed in 64 bits
NEW_COPIES = 2  # on the busiest link, that a batch pays for where none stay; 2 to 8 were planned
_MOST_SAVED = 1 << 30  # more than all ranks' slots, and a number of 32 bits


@dataclass(frozen=True)
class IntegerCosts:
    """A cost model in whole picoseconds, so that every rank decides alike."""

    per_assignment: int
    per_expert_read: int
    per_expert_sent: int  # exposed part of one expert on the busiest link
    per_relay_hop: int
    exchange: int
    plan: int
    base: int = 0  # of a layer, whatever its load


@dataclass(frozen=True)
class CostModel:
    """Costs on one kind of rank. Raises ConfigError for values out of range."""

    seconds_per_assignment: float  # computing it, and its part of dispatch and combine
    bytes_per_expert: int  # all of an expert's weights and scales
    link_bytes_per_second: float  # what one rank sends to others, achieved
    exchange_seconds: float = 0.0  # per layer whose loads are exchanged: count, exchange
    plan_seconds: float = 0.0  # per layer that is planned: plan, reroute, launches
    base_seconds: float = 0.0  # per MoE layer, whatever the load: launches
    read_seconds_per_expert: float = 0.0  # reading one expert's weights from the rank's own memory
    exposed_fraction: float = 1.0  # of a transfer that nothing else hides
    relay_hop_seconds: float = 0.0  # until a relay has its first chunk and forwards it

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) <= _MOST:  # also NaN, and what is no float
                raise ConfigError(f"{name} = {value!r} must be a number, at most {_MOST:g}")
            if value < 0 or (value == 0 and name in _REQUIRED):
                least = "more than 0" if name in _REQUIRED else "0 or more"
                raise ConfigError(f"{name} = {value!r} must be {least}")
        if self.exposed_fraction > 1:
            raise ConfigError(f"exposed_fraction = {self.exposed_fraction} must be 0 to 1")
        times = [getattr(self, field.name) for field in fields(self) if "seconds" in field.name]
        if max(*times, self.seconds_per_sent_expert) > _MOST_SECONDS:
            raise ConfigError(f"a cost, or a transfer, takes more than {_MOST_SECONDS} s")

    @property
    def seconds_per_sent_expert(self) -> float:
        """The exposed time of one expert on its sender's link."""
        return self.exposed_fraction * self.bytes_per_expert / self.link_bytes_per_second

    def integer_costs(self) -> IntegerCosts:
        """Rounded to picoseconds, far below what can be measured.

        Models that ranks measure differ: one rank's, or a mean that all agree on, must go to all.
        """
        return IntegerCosts(
            per_assignment=max(1, _picoseconds(self.seconds_per_assignment)),
            per_expert_read=_picoseconds(self.read_seconds_per_expert),
            per_expert_sent=_picoseconds(self.seconds_per_sent_expert),
            per_relay_hop=_picoseconds(self.relay_hop_seconds),
            exchange=_picoseconds(self.exchange_seconds),
            plan=_picoseconds(self.plan_seconds),
            base=_picoseconds(self.base_seconds),
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """Parse ``to_json``'s output. Raises ConfigError for unknown, missing or bad values."""
        return cls.from_mapping(parse_object(text, "the cost model", is_ours=True))

    @classmethod
    def from_file(cls, path: str | Path) -> "CostModel":
        """Read ``to_json``'s output. Raises ConfigError, also where the file cannot be read."""
        return cls.from_json(read_text(Path(path), "the cost model"))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "CostModel":
        """From names and values. Raises ConfigError as ``from_json``."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown costs {unknown}; choose from {sorted(known)}")
        if missing := [name for name in _REQUIRED if name not in values]:
            raise ConfigError(f"the cost model must also have {missing}")
        return cls(**values)


_REQUIRED = ("seconds_per_assignment", "bytes_per_expert", "link_bytes_per_second")


@dataclass(frozen=True)
class Transfer:
    """What the busiest rank sends and receives."""

    busiest_sender: int  # experts sent by one rank
    busiest_receiver: int  # experts received by one rank

    @property
    def busiest_link(self) -> int:
        """Experts on the busiest link in either direction; links are full duplex."""
        return max(self.busiest_sender, self.busiest_receiver)


def transfer_of(
    slot_expert: IntArray, num_masters: int, parents: NDArray[np.integer] | None = None
) -> Transfer:
    """The transfer of ``slot_expert`` (R, S), -1 empty.

    ``parents`` (R, S), as planned for relays: -1 the master sends, else the slot that does,
    ``rank * S + slot``.
    """
    return Transfer(*map(max, experts_moved(slot_expert, num_masters, parents)))


def experts_moved(
    slot_expert: IntArray, num_masters: int, parents: NDArray[np.integer] | None = None
) -> tuple[list[int], list[int]]:
    """Experts that each rank sends and receives; arguments as ``transfer_of``."""
    num_ranks, num_slots = slot_expert.shape
    sent, received = [0] * num_ranks, [0] * num_ranks
    by_slot = [-1] * slot_expert.size if parents is None else parents.reshape(-1).tolist()
    for slot, expert in enumerate(slot_expert.reshape(-1).tolist()):  # so few that NumPy is slower
        if expert >= 0:
            parent = by_slot[slot]
            sent[parent // num_slots if parent >= 0 else expert // num_masters] += 1
            received[slot // num_slots] += 1
    return sent, received


def saved_picoseconds(
    before: int, after: int, shape: ExpertShape, transfer: Transfer, costs: IntegerCosts
) -> int:
    """Time that following a plan saves, once it has been made; negative where it costs.

    ``before`` and ``after`` are how long the busiest rank takes, as a number of assignments. Only
    the slots that the transfer fills are read beside the masters. Planning does not count: its time
    is spent by then, and a layer that might gain is worth it.
    """
    masters = shape.num_masters
    held = masters + transfer.busiest_receiver
    unbalanced = max(before * costs.per_assignment, masters * costs.per_expert_read)
    balanced = max(after * costs.per_assignment, held * costs.per_expert_read)
    return unbalanced - balanced - transfer.busiest_link * costs.per_expert_sent


def fewest_assignments(
    costs: IntegerCosts, shape: ExpertShape, copies: int, largest: int | None
) -> int:
    """Of a layer over all ranks, from which balancing pays, up to ``largest``; None: no bound.

    It does where the busiest rank has ``expected_percent`` of the mean, and what balancing saves
    is as long as exchange, plan and sending ``copies`` that are not there already.
    """
    percent = expected_percent(shape)
    fixed = costs.exchange + costs.plan + copies * costs.per_expert_sent
    read = (shape.num_masters + shape.num_slots) * costs.per_expert_read
    computed = -(-100 * fixed * shape.num_ranks // ((percent - 100) * costs.per_assignment))
    held = -(-100 * (fixed + read) * shape.num_ranks // (percent * costs.per_assignment))
    fewest = max(computed, held)
    return fewest if largest is None else min(fewest, largest)


def expected_percent(shape: ExpertShape) -> int:
    """What the busiest rank has of the mean before balancing, about, in percent; at least 130.

    The largest of R normal sums of m masters' loads that deviate by half their mean is
    1 + sqrt(ln R / 2m) of it. Loads of large models, as published, are mostly no more even.
    """
    twofold = shape.num_ranks.bit_length() - 1  # ln R as ln 2 times this, alike on all ranks
    return 100 + max(30, math.isqrt(3466 * twofold // shape.num_masters))


def least_saved(costs: IntegerCosts) -> int:
    """How many experts relays must spare the busiest link, to save more than a hop takes."""
    if costs.per_expert_sent == 0:
        return _MOST_SAVED
    return min(costs.per_relay_hop // costs.per_expert_sent + 1, _MOST_SAVED)


def _picoseconds(seconds: float) -> int:
    return round(seconds * _PICOSECONDS)
