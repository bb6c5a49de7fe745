"""The machine and the model whose times `advise` and `simulate` predict."""

import argparse
from pathlib import Path

from ultraep_serve.cli.arguments import number
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
from ultraep_serve.costs.shapes import PRESETS, WEIGHT_BITS, ModelShape
from ultraep_serve.errors import ConfigError
from ultraep_serve.lab.advise.advice import Setting

__all__ = ["add_machine_arguments", "check_machine_arguments", "machine_setting"]


def add_machine_arguments(
    parser: argparse.ArgumentParser, *, hardware: str | None = None, model: str | None = None
) -> None:
    """Flags that ``machine_setting`` reads; hardware and model must be given if not named here."""
    known = f"{', '.join(HARDWARE)}, or custom with --costs"
    parser.add_argument(
        "--hardware", required=hardware is None, default=hardware, metavar="NAME", help=known
    )
    costs = "JSON file of a cost model, for custom hardware"
    parser.add_argument("--costs", type=Path, metavar="FILE", help=costs)
    models = f"a Hugging Face config.json or its directory, or one of {', '.join(PRESETS)}"
    parser.add_argument(
        "--model-config", required=model is None, default=model, metavar="MODEL", help=models
    )
    weights = f"type of the experts' weights: {', '.join(WEIGHT_BITS)}"
    parser.add_argument("--weights", metavar="TYPE", default="bf16", help=weights)
    context = "tokens of a typical prompt"
    parser.add_argument("--context", type=number(1), metavar="N", default=4096, help=context)
    efficiency = "share of the peak FLOPS that is reached (default: 0.5, assumed)"
    parser.add_argument("--efficiency", type=float, metavar="X", help=efficiency)
    rates = "JSON file of measured rates, used instead of the hardware's data sheet"
    parser.add_argument("--operator-rates", type=Path, metavar="FILE", help=rates)


def check_machine_arguments(arguments: argparse.Namespace) -> None:
    """Raise ConfigError where the flags contradict each other."""
    if (arguments.hardware == "custom") != (arguments.costs is not None):
        raise ConfigError("--hardware custom and --costs FILE go together")
    if arguments.costs is not None and arguments.operator_rates is not None:
        raise ConfigError("--costs and --operator-rates exclude each other: give one of them")


def machine_setting(
    arguments: argparse.Namespace, shape: ModelShape, num_ranks: int, domain: int | None
) -> Setting:
    """Ranks on this machine in domains of ``domain``; None is as many as NVLink joins.

    Raises ConfigError for a bad flag or file, or ranks that do not fit the model.
    """
    if domain is None and arguments.hardware != "custom":
        domain = hardware(arguments.hardware).domain_size
    estimate = _estimate(arguments, shape, num_ranks, domain)
    domain = None if domain is None or domain >= num_ranks else domain
    return Setting(shape, estimate, num_ranks, arguments.weights, domain)


def _estimate(
    arguments: argparse.Namespace, shape: ModelShape, num_ranks: int, domain: int | None
) -> Estimate:
    if arguments.costs is not None:
        costs = CostModel.from_file(arguments.costs)
        return custom_estimate(shape, costs, arguments.costs.name)
    measured = None
    if arguments.operator_rates is not None:
        measured = MeasuredRates.from_file(arguments.operator_rates)
        measured.check(shape, arguments.hardware, arguments.weights, arguments.context)
    share = arguments.efficiency
    return estimate_costs(
        shape,
        hardware(arguments.hardware),
        num_ranks=num_ranks,
        weight_type=arguments.weights,
        context_tokens=arguments.context,
        domain_size=domain,
        efficiency=None if share is None else Efficiency(matrix=share, attention=share),
        measured=measured,
    )
