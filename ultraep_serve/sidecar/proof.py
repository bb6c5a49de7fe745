"""What proves that a run answers right: its self-check at start, and samples while it serves."""

from collections.abc import Iterable, Sequence
from typing import Literal

from ultraep_serve.sidecar.documents import Answer
from ultraep_serve.telemetry.ring import RingHeader, SelfCheck, SelfCheckOutcome
from ultraep_serve.types import Policy, VerificationCheck


class SelfCheckPart(Answer):
    """One check of the self-check."""

    name: str
    """kernels or copies; settings, where these leave nothing to balance."""
    seconds: float
    detail: str
    """What was checked; where it failed, what was found."""
    warning: str
    """What to look at, though it passed; empty where there is nothing."""


class SelfCheckSnapshot(Answer):
    """What the server checked of itself before it took requests."""

    result: Literal["passed", "off", "failed"] | None
    """Null until all ranks of this host have ended it. off: nothing but costs was
    looked at."""
    seconds: float
    """Of all checks together."""
    checks: list[SelfCheckPart]


class VerificationCount(Answer):
    """What one kind of check has seen since the start."""

    layers: int
    """Layers of batches that were checked."""
    failures: int
    """Over the ranks of this host."""


class VerificationSnapshot(Answer):
    """Layers of batches that were checked while they were served, since the start."""

    layers: int
    """As of the kind of check that has seen most."""
    failures: int
    """Of all kinds, over the ranks of this host."""
    by_check: dict[str, VerificationCount]
    """assignments, slots, plans, answers."""
    seconds: float
    """That the checks took on the rank which spent most."""
    switched_off: bool
    """A failure has switched balancing off, and nobody has set a policy since."""


def self_check_of(headers: Sequence[RingHeader]) -> SelfCheckSnapshot:
    """The self-check of the ranks with ``headers``; that of one which failed, if any has."""
    found = [header.self_check for header in headers]
    ended = [of_rank for of_rank in found if of_rank is not None]
    if not ended or len(ended) < len(found):
        return SelfCheckSnapshot(result=None, seconds=0.0, checks=[])
    shown = max(ended, key=_weight)
    return SelfCheckSnapshot(
        result=shown.outcome.value,
        seconds=round(shown.seconds, 6),
        checks=[SelfCheckPart(**vars(check)) for check in shown.checks],
    )


def _weight(found: SelfCheck) -> tuple[bool, bool, bool, float]:
    """What is shown of several ranks: a failure, then nothing checked, a warning, the longest."""
    outcome, has_warning = found.outcome, any(check.warning for check in found.checks)
    is_off = outcome is SelfCheckOutcome.OFF
    return outcome is SelfCheckOutcome.FAILED, is_off, has_warning, found.seconds


def verification_of(headers: Sequence[RingHeader], *, is_off: bool) -> VerificationSnapshot:
    """The samples of the ranks with ``headers``; ``is_off`` is ``switched_off``."""
    by_check = {}
    for check in VerificationCheck:
        most: dict[int, int] = {}  # by pipeline stage, whose ranks sample the same layers
        for header in headers:
            stage, count = header.pipeline_stage, header.verified_layers[check]
            most[stage] = max(most.get(stage, 0), count)
        failures = sum(header.verification_failures[check] for header in headers)
        by_check[check.name.lower()] = VerificationCount(
            layers=sum(most.values()), failures=failures
        )
    return VerificationSnapshot(
        layers=max(count.layers for count in by_check.values()),
        failures=sum(count.failures for count in by_check.values()),
        by_check=by_check,
        seconds=max((header.verification_ns for header in headers), default=0) / 1e9,
        switched_off=is_off,
    )


def switched_off(
    headers: Iterable[RingHeader], policy: Policy | None, in_doubt: bool | None
) -> str:
    """Why balancing has switched itself off; empty where it has not.

    ``in_doubt`` is what the control page says; None on hosts that have none, where a failure under
    policy off is taken for it.
    """
    failed = [
        (header.number, check)
        for header in headers
        for check in VerificationCheck
        if header.verification_failures[check]
    ]
    if in_doubt is None:
        in_doubt = policy is Policy.OFF and bool(failed)
    if not in_doubt:
        return ""
    seen = "; ".join(f"rank {number}: {check.name.lower()}" for number, check in failed[:4])
    return (
        "balancing has switched itself off, because what it did to a layer was not what it should"
        f"{f' ({seen})' if seen else ''}; requests are answered without it. Report it with the "
        "engine's log; setting a policy switches it on again"
    )
