"""The one configuration object, and the one place that reads the environment.

The launcher builds a ``BalanceConfig`` from flags and hands it to every engine process in the
variable ``ULTRAEP_CONFIG`` as JSON; unset means that balancing was never switched on.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ultraep_serve.errors import ConfigError
from ultraep_serve.types import Policy

__all__ = [
    "CONFIG_VARIABLE",
    "BalanceConfig",
    "child_environment",
    "control_token_from_environment",
    "parse_policy",
    "plugin_filter",
]

CONFIG_VARIABLE = "ULTRAEP_CONFIG"
TOKEN_VARIABLE = "ULTRAEP_CONTROL_TOKEN"


@dataclass(frozen=True)
class BalanceConfig:
    """Everything a rank needs to know; the same on every rank."""

    policy: Policy = Policy.QUOTA  # policy at start; the sidecar's control endpoint changes it
    num_replica_slots: int = 2  # S, replica slots per rank, shared by all layers
    min_batch_tokens: int = 256  # smaller batches (decode) take the identity mapping
    max_imbalance: float = 1.02  # layers at or below this max/mean are left alone
    allow_ideal: bool = False  # permit the policy that gives wrong answers
    on_unsupported: Literal["error", "off"] = (
        "error"  # what cannot be balanced: stop, or serve plain
    )
    slot_memory: Literal["aliased", "per_layer"] = "aliased"  # one pool for all layers, or one each
    relay: Literal["auto", "always", "never"] = "auto"  # forward widely replicated experts
    domain_size: int = 0  # ranks that weights move between; 0: those of one host
    chunk_bytes: int = 1 << 20  # unit of weight transfer
    timeout_seconds: float = 60.0  # a rank silent for longer is an error
    ring_records: int = 4096  # records kept per rank for the sidecar
    costs: str = ""  # a CostModel as JSON; empty: measured when the model is loaded
    run_dir: str = ""  # directory in shared memory where ranks, sidecar and launcher meet

    def __post_init__(self) -> None:
        _require("policy", self.policy, isinstance(self.policy, Policy), _names(Policy))
        _require(
            "num_replica_slots",
            self.num_replica_slots,
            0 <= self.num_replica_slots <= 64,
            "0 to 64",
        )
        _require("min_batch_tokens", self.min_batch_tokens, self.min_batch_tokens >= 1, "1 or more")
        _require("max_imbalance", self.max_imbalance, self.max_imbalance >= 1.0, "1.0 or more")
        _require(
            "on_unsupported",
            self.on_unsupported,
            self.on_unsupported in ("error", "off"),
            "error, off",
        )
        _require(
            "slot_memory",
            self.slot_memory,
            self.slot_memory in ("aliased", "per_layer"),
            "aliased, per_layer",
        )
        _require(
            "relay", self.relay, self.relay in ("auto", "always", "never"), "auto, always, never"
        )
        _require("domain_size", self.domain_size, self.domain_size >= 0, "0 (a host) or more")
        _require("chunk_bytes", self.chunk_bytes, self.chunk_bytes >= 4096, "4096 or more")
        _require("timeout_seconds", self.timeout_seconds, self.timeout_seconds > 0, "more than 0")
        _require(
            "ring_records", self.ring_records, 16 <= self.ring_records <= 1 << 20, "16 to 1048576"
        )
        if self.policy is Policy.IDEAL and not self.allow_ideal:
            raise ConfigError(
                "policy 'ideal' routes tokens to the wrong experts and is for measuring only; "
                "add --allow-ideal if that is what you want"
            )

    def to_json(self) -> str:
        """This configuration as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "BalanceConfig":
        """Parse ``to_json``'s output. Raises ConfigError for unknown fields or bad values."""
        try:
            values: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{CONFIG_VARIABLE} is not a JSON object: {text}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown settings {unknown}; legal: {sorted(known)}")
        if "policy" in values:
            values["policy"] = parse_policy(values["policy"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} = {text} has a value of a wrong type") from error

    @classmethod
    def from_environment(cls) -> "BalanceConfig | None":
        """The configuration of this process, or None where balancing was not switched on."""
        text = os.environ.get(CONFIG_VARIABLE)
        return cls.from_json(text) if text else None

    @property
    def run_path(self) -> Path:
        """``run_dir`` as a path. Raises ConfigError when it was never set."""
        if not self.run_dir:
            raise ConfigError("run_dir is empty; start through `ultraep-serve`, which sets it")
        return Path(self.run_dir)

    def with_policy(self, policy: Policy) -> "BalanceConfig":
        """The same configuration under another policy."""
        return replace(self, policy=policy)


def parse_policy(name: str) -> Policy:
    """Policy by name. Raises ConfigError naming the legal ones."""
    try:
        return Policy(name)
    except ValueError:
        raise ConfigError(f"unknown policy {name!r}; legal: {_names(Policy)}") from None


def control_token_from_environment() -> str | None:
    """Bearer token for the sidecar's control endpoint, if the operator chose one."""
    return os.environ.get(TOKEN_VARIABLE) or None


def plugin_filter(variable: str) -> str | None:
    """The plugins that the engine's own ``variable`` names, comma-separated; None: not set."""
    return os.environ.get(variable)


def child_environment(config: BalanceConfig, defaults: Mapping[str, str]) -> dict[str, str]:
    """Environment for the launcher's children; the operator's own wins over ``defaults``."""
    return {**defaults, **os.environ, CONFIG_VARIABLE: config.to_json()}


def _names(policies: type[Policy]) -> str:
    return ", ".join(policy.value for policy in policies)


def _require(name: str, value: object, legal: bool, range_text: str) -> None:
    if not legal:
        raise ConfigError(f"{name} = {value!r} is not legal; legal: {range_text}")
