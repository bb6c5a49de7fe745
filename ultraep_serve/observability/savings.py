"""What balancing saved and what it cost, estimated from records alone.

The ranks of a layer finish together, when the busiest one does, so the engine's part of a layer
(verb ``compute``: dispatch, expert kernel, combine) took as long as the busiest rank needed for
the assignments it was given. Had they stayed with the masters, it would have taken longer in
proportion to the busiest rank's assignments. This overstates what is saved where a part of the
engine's time does not depend on the load.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultraep_serve.observability.documented import Documented
from ultraep_serve.observability.schema import RecordArray
from ultraep_serve.types import Verb

__all__ = ["Savings", "avoided_seconds", "savings", "spent_seconds"]

_OWN = [Verb.COUNT, Verb.PLAN, Verb.REPLICATE, Verb.REROUTE, Verb.AWAIT]


@dataclass(frozen=True)
class Savings(Documented):
    """Estimated seconds that balancing saved and spent over the window."""

    saved_seconds: float
    """Time of the engine's part of each layer that evening out the busiest rank avoided: the time
    measured, times (its assignments before / after - 1)."""
    spent_seconds: float
    """Time balancing took: count, plan, replicate, reroute and await on the rank that spent most,
    exchange on the rank that waited least (the others wait for it, as dispatch would make them);
    and what layers took longer whose busiest rank was given more than before."""
    net_seconds: float
    """Saved less spent; negative where balancing costs more than it saves."""


def avoided_seconds(records: RecordArray) -> NDArray[np.float64]:
    """Estimated time that balancing took off each of the lead's ``records`` (n,).

    Negative where the busiest rank was given more than before.
    """
    before = records["load_before"].max(axis=1, initial=0).astype(np.float64)
    after = records["load_after"].max(axis=1, initial=0)
    seconds = records["verb_ns"][:, Verb.COMPUTE] / 1e9
    avoided: NDArray[np.float64] = seconds * (before / np.maximum(after, 1) - 1) * (after > 0)
    return avoided


def spent_seconds(verb_ns: ArrayLike) -> NDArray[np.float64]:
    """Time that balancing took on the critical path, ``verb_ns`` (..., R, verbs) being totals.

    Ranks without any time, which have no records, are left out.
    """
    totals = np.asarray(verb_ns, dtype=np.float64)
    own = totals[..., _OWN].sum(axis=-1).max(axis=-1, initial=0)
    waited = np.where(totals.any(axis=-1), totals[..., Verb.EXCHANGE], np.inf)
    least = waited.min(axis=-1, initial=np.inf)
    spent: NDArray[np.float64] = (own + np.where(np.isinf(least), 0, least)) / 1e9
    return spent


def savings(avoided: NDArray[np.float64], spent: float) -> Savings:
    """Totals of ``avoided`` (n,) seconds, and ``spent`` on the verbs."""
    saved = float(avoided[avoided > 0].sum())
    spent -= float(avoided[avoided < 0].sum())
    return Savings(saved, spent, saved - spent)
