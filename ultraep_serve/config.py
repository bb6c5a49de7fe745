"""Every setting of a server, stated once.

``BalanceConfig`` is the schema of all settings: from it come the launcher's flags and their help,
the JSON that an engine is given (in the variable ``ULTRAEP_CONFIG``, or in a setting of its own),
files of settings, the errors, and the table in ``docs/settings.md``.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.environment import CONFIG_VARIABLE, config_text, keep_config
from ultraep_serve.system.files import parse_object
from ultraep_serve.system.settings import Settings, read_settings
from ultraep_serve.system.versions import NewerEngine
from ultraep_serve.types import Policy, parse_speeds

# From a server's port to its sidecar's. Engines give ports just above the server's to ranks (vLLM:
# server + rank, SGLang: server + 1, + 13, + 233 and after); servers side by side often lie hundreds
# apart.
SIDECAR_DISTANCE = 700
MOST_SLOT_PERCENT = 6  # of a rank's memory, for slots of each layer's own where nobody chose them
LEAST_BATCH_TOKENS = 256  # of the smallest batch where nobody chose it
_VLLM_PORT = 8000
_LAST_PORT = 65535


def _read_costs(given: object) -> object:
    """A cost model from JSON text, a mapping, or the name of a file; None of an empty text."""
    if isinstance(given, Mapping):
        return CostModel.from_mapping(given)
    if not isinstance(given, str | Path):
        return given
    is_text = str(given).lstrip().startswith("{")
    read = CostModel.from_json if is_text else CostModel.from_file
    return read(str(given)) if str(given) else None


def _read_speeds(given: object) -> object:
    if isinstance(given, str):
        parse_speeds(given)
    return given


_Word = BeforeValidator(lambda given: "off" if given is False else given)  # as YAML reads off


class SidecarSettings(Settings):
    """The sidecar's own settings; the launcher's flags for them begin with ``--sidecar-``."""

    host: str = Field(default="127.0.0.1", description="address that the sidecar listens on")
    port: int | None = Field(
        default=None,
        ge=0,
        le=_LAST_PORT,
        description="its port; 0: a free one "
        f"(default: the server's + {SIDECAR_DISTANCE}; {_VLLM_PORT + SIDECAR_DISTANCE} where the "
        "server's is not known)",
    )
    allowed_hosts: str = Field(
        default="",
        description="names, separated by commas, by which browsers and proxies may call it beside "
        "its addresses, this machine's own name and names without a dot (default: none)",
    )

    def port_beside(self, server: int = _VLLM_PORT) -> int:
        """The port that was chosen, else the default one beside a server on port ``server``.

        Raises ConfigError where there is none.
        """
        port = server + SIDECAR_DISTANCE if self.port is None else self.port
        if port > _LAST_PORT:
            raise ConfigError(
                f"beside a server on port {server} the sidecar has none by default; choose "
                "--sidecar-port"
            )
        return port


class BalanceConfig(Settings):
    """Everything a rank needs to know; the same on every rank."""

    policy: Annotated[Policy, _Word] = Field(
        default=Policy.QUOTA,
        description="what to do with prefill batches: quota balances; ideal forces balance with "
        "wrong answers, for measuring; off serves without balancing and reserves nothing",
    )
    slots: int = Field(
        default=2, ge=0, le=64, description="replica slots per rank; see slot_memory"
    )
    min_batch_tokens: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="smaller batches (decode) are left alone; 0: those below "
        f"{LEAST_BATCH_TOKENS}, or too small to pay by measured costs",
    )
    max_imbalance: float = Field(
        default=1.02,
        ge=1.0,
        le=1e6,
        description="layers at or below this max/mean over ranks are left alone",
    )
    speeds: Annotated[str, BeforeValidator(_read_speeds)] = Field(
        default="equal",
        description="how fast ranks are, by which work is shared out: equal; auto, which measures "
        "it while serving; or one number per rank, as 1.0,0.6",
    )
    on_unsupported: Annotated[Literal["error", "off"], _Word] = Field(
        default="error",
        description="what cannot be balanced: refuse to start, or serve without balancing",
    )
    on_newer_engine: NewerEngine = Field(
        default="refuse",
        description="an engine's release after all verified ones: refuse it, or try it and let the "
        "self-check decide",
    )
    self_check: Annotated[Literal["off", "quick", "full"], _Word] = Field(
        default="quick",
        description="what is computed before the server is ready, to prove that its answers are "
        "right: nothing; kernels, copies, and the first and last MoE layer of each kind; or all "
        "layers",
    )
    verify_every: int = Field(
        default=512,
        ge=0,
        le=1 << 30,
        description="one of so many balanced layers is checked while it serves, and balancing "
        "switches itself off where something is wrong; 0: none",
    )
    costs: Annotated[CostModel | None, BeforeValidator(_read_costs)] = Field(
        default=None,
        description="cost model that decides when moving weights pays, a JSON file (default: "
        "measured when the model is loaded)",
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        le=24 * 3600,
        description="a rank silent for longer ends the engine with an error",
    )
    slot_memory: Literal["auto", "per_layer", "shared"] = Field(
        default="auto",
        description="per_layer: each layer has slots of its own, where copies stay and later "
        "batches are spared them; shared: all layers have the same; auto: per_layer where that "
        f"takes at most {MOST_SLOT_PERCENT} percent of each rank's memory",
    )
    domain_size: int = Field(
        default=0,
        ge=0,
        le=1 << 16,
        description="weights move between so many ranks: 0, those of a host; fewer; or, where GPUs "
        "share memory between hosts (IMEX), those of several",
    )
    allow_ideal: bool = Field(
        default=False, description="permit policy ideal, which gives wrong answers, for measuring"
    )
    sidecar: SidecarSettings | None = Field(
        default=None,
        description="settings of a sidecar that the primary rank of each host starts (default: "
        "none; `ultraep-serve` asks for one)",
        json_schema_extra={"flag": False},
    )

    @model_validator(mode="after")
    def _other_answers_are_asked_for(self) -> "BalanceConfig":
        if self.policy is Policy.IDEAL and not self.allow_ideal:
            raise ValueError(
                "policy 'ideal' routes tokens to the wrong experts and is for measuring only; "
                "add --allow-ideal if that is what you want"
            )
        return self

    @model_validator(mode="after")
    def _what_is_tried_is_checked(self) -> "BalanceConfig":
        if self.on_newer_engine == "try" and self.self_check == "off":
            raise ValueError(
                "on_newer_engine 'try' needs a self-check; set self_check to quick or full"
            )
        return self

    @classmethod
    def from_json(cls, text: str) -> "BalanceConfig":
        """Parse ``to_json``'s output. Raises ConfigError for unknown settings or bad values."""
        return cls(**parse_object(text, CONFIG_VARIABLE, is_ours=True))

    @property
    def least_tokens(self) -> int:
        """Of a batch that may be balanced, before costs are known."""
        return self.min_batch_tokens or LEAST_BATCH_TOKENS

    @classmethod
    def from_environment(cls) -> "BalanceConfig | None":
        """The configuration of this process, or None where balancing was not switched on.

        The variable holds JSON, or ``@`` and the name of a file. Raises ConfigError.
        """
        text = config_text()
        if not text:
            return None
        if not text.startswith("@"):
            return cls.from_json(text)
        config = cls(**read_settings(Path(text[1:])))
        keep_config(config.to_json())  # what this process starts reads the same
        return config

    @classmethod
    def chosen(cls, given: object, name: str) -> "BalanceConfig | None":
        """The configuration that the engine was ``given`` in its own setting ``name``, or this
        process's; None where there is neither.

        Raises ConfigError for unknown settings and bad values, and where there are both and they
        differ.
        """
        environment = cls.from_environment()
        if given is None:
            return environment
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name} must be a JSON object of settings, not {given!r}")
        config = cls(**given)
        if environment is not None and environment != config:
            fields = cls.model_fields
            differs = next(n for n in fields if getattr(config, n) != getattr(environment, n))
            raise ConfigError(
                f"{name} and the variable {CONFIG_VARIABLE} say different things about {differs}; "
                "use one of them"
            )
        return config


def add_file_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of a file that ``given_settings`` reads."""
    text = "YAML or JSON file of settings by name; flags override it"
    parser.add_argument("--ultraep-config", type=Path, metavar="FILE", help=text)


def given_settings(
    arguments: argparse.Namespace, sidecar_prefix: str
) -> tuple[BalanceConfig, SidecarSettings]:
    """A server's and its sidecar's settings: those of the file, and flags, which override it.

    Raises ConfigError for unknown settings and bad values.
    """
    path: Path | None = arguments.ultraep_config
    file = {} if path is None else read_settings(path)
    sidecar = file.pop("sidecar", None) or {}
    if not isinstance(sidecar, Mapping):
        raise ConfigError(f"{path}: sidecar must hold settings by name, not {sidecar!r}")
    try:
        return (
            BalanceConfig.from_flags(arguments, beneath=file),
            SidecarSettings.from_flags(arguments, sidecar_prefix, sidecar),
        )
    except ConfigError as error:
        raise error if path is None else ConfigError(f"{error} (of flags and {path})") from None
