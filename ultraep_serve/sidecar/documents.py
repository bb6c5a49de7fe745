"""Answers about a server's state, and what all answers share: text below a field is its own."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ultraep_serve.types import Policy


class Answer(BaseModel):
    """Base of all that the HTTP interface returns."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Document(Answer):
    """An answer that stands alone."""

    schema_version: int = 3


class Readiness(Document):
    """Whether the server of this host is as its operator wants it."""

    ready: bool
    status: Literal["ready", "not ready", "unbalanced"]
    """unbalanced: it could not be balanced, and runs all the same, as its operator chose with
    on_unsupported=off; or balancing has switched itself off, because a sample failed."""
    reasons: dict[str, str]
    """Why it is not ready or not balanced, by rank; under ``run`` where no rank is known."""


class NoBalance(Readiness):
    """There are no figures: no rank has joined, or the server runs unbalanced."""

    detail: str
    """Which of both, and why."""


class ConfigAnswer(Document):
    """How the server was started."""

    version: str
    """Of ultraep_serve."""
    control_open: bool
    """Whether there is a token that gives access to control."""
    config: dict[str, Any] | None
    """The settings at start, without secrets; null where there are none."""


class PolicyRequest(BaseModel):
    """The policy to put in force."""

    model_config = ConfigDict(extra="forbid")

    policy: Policy


class PolicyAnswer(Document):
    """The policy put in force."""

    policy: Policy


class RankState(Answer):
    """The current state of one rank."""

    rank: int
    pid: int | None = None
    state: str = "missing"
    """starting, ready, failed, stopped; missing where it has no readable ring."""
    alive: bool = False
    """It sends heartbeats and has not failed, stopped or died."""
    heartbeat_age_seconds: float | None = None
    last_batch_age_seconds: float | None = None
    """Since its last batch of any size; null before any."""
    lost: int = 0
    """Records that it could not write, since it started."""
    missed: int = 0
    """Records overwritten or damaged before the sidecar read them."""
