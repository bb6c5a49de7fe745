"""What ``replay`` takes, and the flags of its command."""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from ultraep_lab.words import words_of
from ultraep_serve.system.settings import Settings
from ultraep_serve.types import parse_speeds

MOST_LAYERS = 10_000  # no model has more


_Speed = Annotated[float, Field(gt=0, le=1)]


def _read_layers(given: object) -> object:
    """``0,3,6-8`` as numbers."""
    words = words_of(given)
    if not isinstance(words, tuple) or not any(isinstance(word, str) for word in words):
        return given
    layers: list[int] = []
    for word in map(str, words):
        first, dash, last = word.partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            span = range(0)
        if not 0 < len(span) <= MOST_LAYERS:
            raise ValueError(f"{word!r} must be as in 0 3 6-8")
        layers += span
    return tuple(layers)


def _read_speeds(given: object) -> object:
    """One number per rank; () for ``equal``."""
    return parse_speeds(given, words=("equal",)) if isinstance(given, str) else given


class ReplayOptions(Settings):
    """How to cut and place the trace."""

    num_ranks: int = Field(
        validation_alias="ep", ge=1, description="ranks of the expert-parallel group"
    )
    num_slots: int = Field(
        default=2, validation_alias="slots", ge=0, le=64, description="replica slots per rank"
    )
    batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens per batch over all ranks; a trace of loads has its own batches",
    )
    layers: Annotated[tuple[int, ...] | None, BeforeValidator(_read_layers)] = Field(
        default=None,
        description="MoE layers, as in 0 3 6-8 (default: all)",
        json_schema_extra={"metavar": "N", "nargs": "+"},
    )
    limit: int | None = Field(default=None, ge=1, description="replay at most N batches")
    domain_size: int | None = Field(
        default=None, ge=1, description="ranks per domain (default: all)"
    )
    history_batches: int = Field(
        default=8,
        validation_alias="history",
        ge=1,
        description="past batches that eplb and lplb see",
    )
    rebalance_every: int = Field(
        default=1, ge=1, description="batches between updates of what they see"
    )
    skip: int | None = Field(
        default=None,
        ge=0,
        description="first batches, used as history only (default: where a policy looks at the "
        "past, as many as it sees, at most half of all; else none)",
    )
    speeds: Annotated[tuple[_Speed, ...] | None, BeforeValidator(_read_speeds)] = Field(
        default=None,
        description="how fast ranks are, one number each like 1.0,0.6 (default: as the trace says, "
        "or equal)",
        json_schema_extra={"metavar": "equal|X,..."},
    )

    @model_validator(mode="after")
    def _as_many_as_ranks(self) -> "ReplayOptions":
        if (self.domain_size or 0) > self.num_ranks:
            raise ValueError(
                f"--domain-size = {self.domain_size} must be 1 to {self.num_ranks}, the ranks"
            )
        if self.speeds and len(self.speeds) != self.num_ranks:
            raise ValueError(f"--speeds are {len(self.speeds)} numbers for {self.num_ranks} ranks")
        return self
