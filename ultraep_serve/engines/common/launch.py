"""What the launch files of all engines share; imports no engine."""

import argparse
from collections.abc import Mapping
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ultraep_serve.errors import POLICY_OFF, ConfigError, UnsupportedError
from ultraep_serve.system.files import read_object

__all__ = [
    "EngineFlags",
    "RankCount",
    "allocator",
    "caches_every_token",
    "check_experts",
    "context_length",
    "count_experts",
    "local_url",
    "package_folder",
]

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_PARTLY_CACHED_KEYS = (
    *("sliding_window", "layer_types", "attention_chunk_size", "full_attention_interval"),
    *("linear_attn_config", "attn_type_list", "hybrid_override_pattern", "mamba_num_heads"),
)


class EngineFlags(argparse.ArgumentParser):
    """The few flags of an engine that are read before it starts."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message)


class RankCount(NamedTuple):
    """How many ranks a server's flags ask for."""

    total: int  # ranks on all hosts
    here: int  # ranks on this host
    stages: int  # pipeline stages, which have equally many ranks
    in_stage_here: int  # ranks of one stage on this host

    @property
    def in_stage(self) -> int:
        """R, the ranks of one pipeline stage."""
        return self.total // self.stages


def check_experts(model: str, engine: str, num_ranks: int | None) -> None:
    """Refuse a local checkpoint that names no experts, or none that divide evenly over ranks.

    ``num_ranks`` None: not known before the engine has read its own file of flags. A model that is
    not local is checked when it is loaded. Raises UnsupportedError, and ConfigError where its
    configuration cannot be read.
    """
    config = _configuration(model)
    if config is None:
        return
    experts = _count_experts(config)
    if experts is None:
        raise UnsupportedError(
            f"{model} is not a Mixture-of-Experts model ({config.get('architectures')}); "
            f"serve it with --policy off, or with {engine} itself",
            otherwise="",
        )
    if num_ranks and experts % num_ranks:
        raise UnsupportedError(
            f"{experts} experts do not divide evenly over {num_ranks} ranks; choose a number of "
            "ranks that divides them",
            otherwise=POLICY_OFF,
        )


def count_experts(model: str) -> int | None:
    """Routed experts of a layer, of a local model; None: not known. Raises ConfigError."""
    config = _configuration(model)
    return None if config is None else _count_experts(config)


def _count_experts(config: Mapping[str, Any]) -> int | None:
    nested = [value for value in config.values() if isinstance(value, dict)]
    found = (part.get(key) for part in [config, *nested] for key in _EXPERT_KEYS)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def allocator() -> dict[str, str]:
    """What has an engine on a CPU allocate memory by tcmalloc, where that is installed.

    glibc gives the memory of a large tensor back as soon as that is freed, and the next operation
    waits while the system clears as many pages again, on some ranks more than on others.
    """
    found = map(find_library, ("tcmalloc_minimal", "tcmalloc"))
    return {"LD_PRELOAD": name} if (name := next(filter(None, found), None)) else {}


def context_length(model: str, chosen: str | None) -> int | None:
    """Tokens of the longest request: as ``chosen`` by the user, else what a local model allows.

    None: that is not known before the model is loaded, or the engine is to choose it.
    """
    if chosen is not None:
        return int(chosen) if chosen.isdecimal() else None
    try:
        config = _configuration(model) or {}
    except ConfigError:  # which the engine says when it loads the model
        return None
    nested = config.get("text_config")
    found = (nested if isinstance(nested, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else None


def caches_every_token(model: str) -> bool:
    """Whether each layer of a local model keeps keys and values of all tokens; False: unknown.

    Layers with a window, and those with a state instead, keep less.
    """
    try:
        config = _configuration(model)
    except ConfigError:
        return False
    if config is None:
        return False
    nested = config.get("text_config")
    part = nested if isinstance(nested, dict) else config
    return not any(part.get(key) for key in _PARTLY_CACHED_KEYS)


def _configuration(model: str) -> dict[str, Any] | None:
    """The ``config.json`` of a local model; None where there is none here. Raises ConfigError."""
    try:
        return read_object(Path(model) / "config.json", "the model's configuration")
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise ConfigError(f"{error}; mend it or fetch the model again, or name another") from error


def package_folder(name: str) -> Path:
    """Where a top-level package that is installed has its files; it is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{name} is no package here")
    return Path(spec.submodule_search_locations[0])


def local_url(host: str, port: int, certificate: str | None) -> str:
    """Where a server bound to ``host`` answers on this machine; with a ``certificate`` by TLS."""
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    scheme = "https" if certificate else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
