"""Rates that operators reach on one GPU, and files of measured ones.

A file is JSON. ``rates`` has any of the fields of ``Rates``; the other keys say what they hold for:

    {"schema_version": 1, "source": "who measured, with what", "hardware": "gb200",
     "weights": "bf16", "context_tokens": 4096, "hidden_size": 4096, "expert_size": 1536,
     "rates": {"expert_flops": 1.0e15, "dispatch_bytes_per_second": 5.0e11}}
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ultraep_serve.costs.shapes import ModelShape
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import parse_object, read_text

__all__ = ["RATES_SCHEMA_VERSION", "RATE_NAMES", "MeasuredRates", "Rates"]

RATES_SCHEMA_VERSION = 1
_LEAST, _MOST = 1e6, 1e18  # per second: what no GPU is below or above


@dataclass(frozen=True)
class Rates:
    """What operators of prefill sizes reach on one GPU; a multiply-add counts as two FLOPs."""

    expert_flops: float  # per second: routed experts
    dense_flops: float  # per second: projections, shared experts, dense layers
    attention_flops: float  # per second: scores and values, each token seeing half the prompt
    memory_bytes_per_second: float  # reading experts' weights
    dispatch_bytes_per_second: float  # of all assignments of a rank, dispatched and combined


RATE_NAMES = tuple(field.name for field in fields(Rates))


@dataclass(frozen=True)
class MeasuredRates:
    """Measured rates, and what they hold for. Raises ConfigError for values out of range."""

    source: str
    hardware: str  # a name of HARDWARE
    weights: str
    context_tokens: int
    hidden_size: int
    expert_size: int
    rates: Mapping[str, float]  # by names of Rates; those that are missing were not measured

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.rates) - set(RATE_NAMES)):
            raise ConfigError(f"unknown rates {unknown}; choose from {', '.join(RATE_NAMES)}")
        if not self.rates:
            raise ConfigError(f"rates must have some of {', '.join(RATE_NAMES)}")
        for name, value in self.rates.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not _LEAST <= value <= _MOST:
                raise ConfigError(f"{name} = {value!r} must be {_LEAST:g} to {_MOST:g} per second")

    @classmethod
    def from_file(cls, path: Path) -> "MeasuredRates":
        """Read a file. Raises ConfigError naming the file and what is missing or wrong."""
        values = parse_object(read_text(path, "the operators' rates"), str(path))
        if (version := values.get("schema_version")) != RATES_SCHEMA_VERSION:
            raise ConfigError(f"{path}: schema_version {version!r} is not {RATES_SCHEMA_VERSION}")
        kinds = {field.name: _KINDS.get(field.name, str) for field in fields(cls)}
        for name, kind in kinds.items():
            if name not in values:
                raise ConfigError(f"{path}: {name} is missing")
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise ConfigError(f"{path}: {name} must be {_WORDS[kind]}")
        try:
            return cls(**{name: values[name] for name in kinds})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def check(self, shape: ModelShape, hardware: str, weights: str, context_tokens: int) -> None:
        """Raise ConfigError where they were measured for something else."""
        wanted = {
            "hardware": hardware,
            "weights": weights,
            "context_tokens": context_tokens,
            "hidden_size": shape.hidden_size,
            "expert_size": shape.expert_size,
        }
        for name, value in wanted.items():
            if (measured := getattr(self, name)) != value:
                raise ConfigError(
                    f"the operators' rates hold for {name} = {measured}, not {value}; measure or "
                    "export them for this setting, or leave out --operator-rates"
                )


_KINDS: Mapping[str, type[Any]] = {
    "context_tokens": int,
    "hidden_size": int,
    "expert_size": int,
    "rates": dict,
}
_WORDS = {str: "text", int: "a whole number", dict: "a JSON object"}
