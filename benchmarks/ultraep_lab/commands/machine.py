"""The machine and the model whose times `advise` and `simulate` predict."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from ultraep_lab.advise.advice import Setting
from ultraep_serve.cli.arguments import WeightType
from ultraep_serve.costs.hardware import (
    HARDWARE,
    Efficiency,
    Estimate,
    custom_estimate,
    estimate_costs,
    hardware,
)
from ultraep_serve.costs.model import CostModel
from ultraep_serve.costs.operator_rates import MeasuredRates
from ultraep_serve.costs.shapes import PRESETS, ModelShape
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import parse_object, read_text
from ultraep_serve.system.settings import Settings, Shown

__all__ = ["Hardware", "MachineFlags", "Model", "machine_setting"]

Hardware = Annotated[
    str,
    Shown("NAME"),
    Field(description=f"{', '.join(HARDWARE)}, or custom with --costs"),
]
Model = Annotated[
    str,
    Shown("MODEL"),
    Field(
        validation_alias="model_config",
        description=f"a Hugging Face config.json or its directory, or one of {', '.join(PRESETS)}",
    ),
]


class MachineFlags(Settings):
    """What ``machine_setting`` reads."""

    hardware: Hardware
    costs: Path | None = Field(
        default=None,
        description="JSON file of a cost model, or of `status --json`, or log of a server that "
        "measured one, for custom hardware",
    )
    model: Model
    weights: WeightType = "bf16"
    context: int = Field(default=4096, ge=1, description="tokens of a typical prompt")
    efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="share of the peak FLOPS that is reached (default: 0.5, assumed)",
    )
    operator_rates: Path | None = Field(
        default=None,
        description="JSON file of measured rates, used instead of the hardware's data sheet",
    )

    @model_validator(mode="after")
    def _agree(self) -> "MachineFlags":
        if (self.hardware == "custom") != (self.costs is not None):
            raise ValueError("--hardware custom and --costs FILE go together")
        if self.costs is not None and self.operator_rates is not None:
            raise ValueError("--costs and --operator-rates exclude each other: give one of them")
        return self


def machine_setting(
    flags: MachineFlags, shape: ModelShape, num_ranks: int, domain: int | None
) -> Setting:
    """Ranks on this machine in domains of ``domain``; None is as many as NVLink joins.

    Raises ConfigError for a bad file, or ranks that do not fit the model.
    """
    if domain is None and flags.hardware != "custom":
        domain = hardware(flags.hardware).domain_size
    estimate = _estimate(flags, shape, num_ranks, domain)
    domain = None if domain is None or domain >= num_ranks else domain
    return Setting(shape, estimate, num_ranks, flags.weights, domain)


def _estimate(
    flags: MachineFlags, shape: ModelShape, num_ranks: int, domain: int | None
) -> Estimate:
    if flags.costs is not None:
        return custom_estimate(shape, _costs(flags.costs), flags.costs.name)
    measured = None
    if flags.operator_rates is not None:
        measured = MeasuredRates.from_file(flags.operator_rates)
        measured.check(shape, flags.hardware, flags.weights, flags.context)
    share = flags.efficiency
    return estimate_costs(
        shape,
        hardware(flags.hardware),
        num_ranks=num_ranks,
        weight_type=flags.weights,
        context_tokens=flags.context,
        domain_size=domain,
        efficiency=None if share is None else Efficiency(matrix=share, attention=share),
        measured=measured,
    )


def _costs(path: Path) -> CostModel:
    """The costs in ``path``: a cost model, the answer of ``status --json``, or a server's log.

    Of a log those that it printed last. Raises ConfigError.
    """
    text = read_text(path, "the cost model")
    if logged := re.findall(r"ultraep: costs (\{[^{}]*\})", text):
        return CostModel.from_json(logged[-1])
    values = parse_object(text, "the cost model")
    if "costs" not in values:
        return CostModel.from_mapping(values)
    if not isinstance(values["costs"], dict):
        raise ConfigError(f"the server of {path} had measured no costs yet; ask it again")
    return CostModel.from_mapping(values["costs"])
