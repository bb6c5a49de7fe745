"""Samples in service: one layer of so many is checked while it serves; in doubt all ranks are off.

All ranks count the layers in which they exchange, so they take the same samples without a message.
The number of layers between two samples has no factor in common with the number of layers of a
batch: every layer has its turn.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch

from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.errors import UltraEPError
from ultraep_serve.proof.answers import AnswerCheck, Answers
from ultraep_serve.proof.checks import Checksums, LayerChecks
from ultraep_serve.system.files import write_whole
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.types import VerificationCheck

logger = logging.getLogger(__name__)

_ANSWERS_EVERY = 8  # samples, of which one has answers computed again
_PROBLEMS = {
    VerificationCheck.ASSIGNMENTS: "an assignment went elsewhere than the plan says",
    VerificationCheck.SLOTS: "slots had other bytes than their masters",
    VerificationCheck.PLANS: "ranks made other plans, or quotas are not the loads",
    VerificationCheck.ANSWERS: "tokens computed by copies differ from those of masters",
}


@dataclass(frozen=True)
class Sampled:
    """What layers are checked by while they serve."""

    parameters: Sequence[Sequence[torch.Tensor]]  # by layer, as the engine holds its experts
    answers: Answers | None  # None: the engine cannot be asked
    report_path: Path  # of the file that says what a failed check has seen
    versions: Callable[[], Mapping[str, str]]  # of what computes here, by name


@dataclass(frozen=True)
class Sample:
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
        return None if rest else Sample(layer, (number - 1) % self._answers_every == 0)


class Samples:
    """What samples are made of on host and device, and what a failed check leaves."""

    def __init__(
        self, setup: GroupSetup, sampled: Sampled, recorder: Recorder, checksums: Checksums
    ) -> None:
        self._setup, self._sampled, self._recorder = setup, sampled, recorder
        self._checks = LayerChecks(setup.shape, setup.location.rank, setup.view, checksums)
        shape, answers = setup.shape, sampled.answers
        layers = len(sampled.parameters) * shape.num_micro_batches
        self._turns = SampleTurns(setup.config.verify_every, layers)
        self._answers: AnswerCheck | None = None
        if answers is not None and shape.num_slots and shape.num_micro_batches == 1:
            copies = min(shape.num_logical_experts, shape.num_ranks * shape.num_slots)
            self._answers = AnswerCheck(shape, answers, copies)
        self.is_in_doubt = False  # something was found that the others do not know yet

    def _tensors(self, layer: int) -> list[torch.Tensor]:
        """What the engine reads the layer's experts from."""
        return [parameter.data for parameter in self._sampled.parameters[layer]]

    def _raise(self, check: VerificationCheck, layer: int, **seen: Any) -> None:
        """``check`` failed in ``layer``: count it, log it, and write the report.

        ``seen`` are lists and numbers that help to understand it.
        """
        self._recorder.count_verification_failure(check)
        if self.is_in_doubt:  # the first says it
            return
        self.is_in_doubt = True
        path = self._sampled.report_path
        try:
            report = self._report(check, layer) | {"seen": seen}
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
            _PROBLEMS[check],
            where,
        )

    def _report(self, check: VerificationCheck, layer: int) -> dict[str, Any]:
        """No weights, no tokens, and no names of hosts or files."""
        setup, location = self._setup, self._setup.location
        return {
            "check": check.name.lower(),
            "layer": layer,
            "problem": _PROBLEMS[check],
            "rank": location.rank,
            "versions": self._sampled.versions(),
            "shape": asdict(setup.shape),
            "domain_size": location.domain_size,
            "view": setup.view.value,
            "settings": setup.config.model_dump(mode="json", exclude={"sidecar"}),
            "tensors": [
                {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
                for tensor in self._sampled.parameters[layer]
            ],
        }


def _without_common_factor(least: int, number: int) -> int:
    while gcd(least, number) > 1:
        least += 1
    return least
