"""Samples in service: which layers are checked while they serve, and what a failed check leaves.

All ranks count the layers in which they exchange, so they take the same samples without a message.
The number of layers between two samples has no factor in common with the number of layers of a
batch: every layer has its turn.
"""

import contextlib
import json
import logging
from dataclasses import dataclass
from math import gcd
from typing import Any

from ultraep_serve.balance.backend import GroupSetup, Sampled
from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.files import write_whole
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import VerificationCheck

__all__ = ["Doubt", "Sample", "SampleTurns"]

logger = logging.getLogger(__name__)

_ANSWERS_EVERY = 8  # samples, of which one has answers computed again


@dataclass(frozen=True)
class Sample:
    """One layer of one batch that is checked."""

    number: int  # counted from 0
    layer: int
    with_answers: bool


class SampleTurns:
    """Says which layers are checked, alike on every rank."""

    def __init__(self, every: int, num_layers: int) -> None:
        """About ``every`` layers of ``num_layers`` in a batch."""
        self._every = _without_common_factor(every, num_layers)
        self._answers_every = _without_common_factor(_ANSWERS_EVERY, num_layers)
        self._layers = 0

    def next(self, layer: int) -> Sample | None:
        """Count ``layer``, in which all ranks exchange; None where it is not checked."""
        self._layers += 1
        number, rest = divmod(self._layers, self._every)
        if rest:
            return None
        return Sample(number - 1, layer, (number - 1) % self._answers_every == 0)


class Doubt:
    """What this rank has found wrong, until all ranks know that it is in doubt."""

    def __init__(self, setup: GroupSetup, sampled: Sampled, recorder: Recorder) -> None:
        self._setup, self._sampled, self._recorder = setup, sampled, recorder
        self.is_there = False  # something was found that the others do not know yet

    def raise_with(self, check: VerificationCheck, layer: int, problem: str, **seen: Any) -> None:
        """``problem`` was found in ``layer``: count it, log it, and write the report.

        ``seen`` are arrays, numbers and texts that help to understand it.
        """
        self._recorder.count_verification_failure(check)
        if self.is_there:  # the first says it
            return
        self.is_there = True
        path = self._sampled.report_path
        report = self._report(check, layer, problem, seen)
        try:
            write_whole(path, json.dumps(report, indent=1).encode())
            where = f"{path} says more, to send with a report"
        except (UltraEPError, OSError) as error:
            where = f"no report was written: {error}"
        logger.error(
            "ultraep: rank %d is in doubt, and balancing is off on all ranks until somebody "
            "sets a policy: the check of %s in layer %d found that %s; %s",
            self._setup.location.rank,
            check.name.lower(),
            layer,
            problem,
            where,
        )

    def _report(
        self, check: VerificationCheck, layer: int, problem: str, seen: dict[str, Any]
    ) -> dict[str, Any]:
        """No weights, no tokens, and no names of hosts or files."""
        setup, location = self._setup, self._setup.location
        parameters = self._sampled.parameters[layer]
        return {
            "check": check.name.lower(),
            "layer": layer,
            "problem": problem,
            "rank": location.rank,
            "versions": self._sampled.versions(),
            "sizes": {
                "num_ranks": location.num_ranks,
                "domain_size": location.domain_size,
                "num_logical_experts": setup.shape.num_logical_experts,
                "num_replica_slots": setup.shape.num_replica_slots,
                "view": setup.view.value,
                "num_layers": len(self._sampled.parameters),
            },
            "settings": setup.config.model_dump(mode="json", exclude={"run_dir", "sidecar"}),
            "tensors": [
                {"dtype": str(tensor.dtype), "shape": list(tensor.shape)} for tensor in parameters
            ],
            "seen": {name: _plain(value) for name, value in seen.items()},
        }


def _without_common_factor(least: int, number: int) -> int:
    while gcd(least, number) > 1:
        least += 1
    return least


def _plain(value: Any) -> Any:
    with contextlib.suppress(AttributeError):
        return value.tolist()  # of arrays
    return value
