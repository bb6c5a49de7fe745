"""What launchers share, with adapters and doctor: commands, ranks, what is required of settings."""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.launcher.guard import PLUGIN, left_out
from ultraep_serve.system.files import parse_object, read_object

PLUGIN_GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}  # entry points
NO_LORA = "LoRA on experts is not there yet; drop --enable-lora"
NO_MEASURED_SPEEDS = (
    "a megakernel waits for other ranks within, so its time tells no rank's speed; "
    "use --speeds equal, or numbers"
)

# An attribute's name (dots lead further inside); its valid value, several of them, or a function
# that says whether a value is one; what is wrong with others and what to do, {value} being theirs.
Requirement: TypeAlias = tuple[str, object, str]

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class EngineCommand:
    """What this process is to become; made by an engine's launcher."""

    arguments: list[str]  # of the engine's own server
    environment: dict[str, str]  # defaults; the user's own win
    address: tuple[str, int] | None  # where it will listen; None: this host has ranks alone
    said: Sequence[str] = ()  # what was chosen for the user, a line each


class RankCount(NamedTuple):
    """How many ranks a server's flags ask for."""

    total: int  # ranks on all hosts
    here: int  # ranks on this host
    stages: int  # pipeline stages, which have equally many ranks
    in_stage_here: int  # ranks of one stage on this host
    micro_batches: int = 1  # that may overlap, each with slots of its own

    @property
    def in_stage(self) -> int:
        """R, the ranks of one pipeline stage."""
        return self.total // self.stages


def read_flags(engine: str, flags: Sequence[str]) -> argparse.Namespace:
    """What the parser of ``engine`` ("vllm" or "sglang") makes of its ``flags``; ``model`` too.

    In a process of its own, because engines take seconds to import. Raises ConfigError.
    """
    done = run_reader([f"ultraep_serve.engines.{engine}.flags", *flags])
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"{engine} cannot read its flags: {last.partition('error: ')[2] or last}")
    return argparse.Namespace(**parse_object(done.stdout.splitlines()[-1], f"what {engine} reads"))


def run_reader(module: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a module of Python, and its arguments, to its end."""
    command = [sys.executable, "-m", *module]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def rank_count(
    tensor: int, hosts: int, stages: int = 1, replicas: int = 1, here: int | None = None
) -> RankCount:
    """How ranks lie on ``hosts``, of which this one has ``here``; None: its equal share.

    There are ``tensor`` times ``stages`` times ``replicas``. Raises ConfigError.
    """
    if min(tensor, hosts, stages, replicas) < 1:
        raise ConfigError("sizes of parallelism and numbers of hosts must be 1 or more")
    total = tensor * stages * replicas
    if here is None:
        if total % hosts:
            raise ConfigError(
                f"{total} ranks do not divide evenly over --nnodes {hosts}; choose a number of "
                "hosts that divides them"
            )
        here = total // hosts
    if not 0 <= here <= total:
        raise ConfigError(f"{here} of {total} ranks cannot be on this host; choose 0 to {total}")
    return RankCount(total, here, stages, max(1, here // stages))


def require_large_batches(config: BalanceConfig, largest_batch: int | None) -> None:
    """Raise UnsupportedError where even the largest batch is left alone, as decode is.

    It has ``largest_batch`` tokens over all ranks; None: the engine sets no bound.
    """
    if largest_batch is not None and largest_batch < config.least_tokens:
        raise UnsupportedError(
            f"no batch has --min-batch-tokens {config.least_tokens} tokens: the largest that "
            f"the engine schedules has {largest_batch} over all ranks; choose --min-batch-tokens "
            f"{largest_batch} or less"
        )


def unmet(subject: object, requirements: Iterable[Requirement]) -> str | None:
    """The advice of the first of ``requirements`` that ``subject`` does not meet."""
    for name, valid, advice in requirements:
        value = attrgetter(name)(subject)
        if callable(valid):
            is_met = valid(value)
        else:
            is_met = value in (valid if isinstance(valid, tuple) else (valid,))
        if not is_met:
            return advice.format(value=value)
    return None


def check_plugin(engine: str) -> None:
    """Refuse to start ``engine`` ("vllm" or "sglang") where it would not load this package.

    Raises ConfigError.
    """
    group = PLUGIN_GROUPS[engine]
    if not entry_points(group=group, name=PLUGIN):
        raise ConfigError(
            f"{group} does not register {PLUGIN}: the engine would not load it; install "
            "ultraep-serve with pip into the engine's own environment"
        )
    if problem := left_out(engine):
        raise ConfigError(problem)


def check_model(model: str) -> None:
    """Refuse a path that is not there; other names may be a hub's. Raises ConfigError."""
    if model.startswith(("/", ".", "~")) and not Path(model).exists():
        raise ConfigError(f"{model} does not exist; name a directory that holds a model")


def check_cpu_experts(model: str, quantization: str | None, needed: str) -> None:
    """Refuse quantised experts, balanced or not, where what they ``needed`` is missing.

    ``quantization`` is what the engine's flag of that name says. A checkpoint that names experts
    among what was left as it was may have plain ones. Raises UnsupportedError, ConfigError.
    """
    parts = _parts(_configuration(model) or {})
    formats = list(filter(None, (part.get("quantization_config") for part in parts)))
    if (formats or quantization) and "expert" not in str(formats):
        drop = f"drop --quantization {quantization}"
        remedy = "use an unquantised checkpoint" if formats else drop
        raise UnsupportedError(f"quantised experts need {needed}; {remedy}", otherwise="")


def check_experts(model: str, engine: str, config: BalanceConfig, num_ranks: int) -> None:
    """Refuse a local checkpoint that names no experts, or none that divide evenly over ranks.

    A model that is not local is checked when it is loaded. Raises UnsupportedError, and ConfigError
    where its configuration cannot be read.
    """
    found = _configuration(model)
    if found is None:
        return
    experts = experts_of(found)
    if experts is None:
        raise UnsupportedError(
            f"{model} is not a Mixture-of-Experts model ({found.get('architectures')}); "
            f"serve it with --policy off, or with {engine} itself",
            otherwise="",
        )
    if experts % num_ranks and config.on_unsupported == "error":
        raise UnsupportedError(
            f"{experts} experts do not divide evenly over {num_ranks} ranks; choose a number of "
            "ranks that divides them"
        )


def count_experts(model: str) -> int | None:
    """Routed experts of a layer, of a local model; None: not known. Raises ConfigError."""
    config = _configuration(model)
    return None if config is None else experts_of(config)


def experts_of(config: Mapping[str, Any]) -> int | None:
    """Routed experts of a layer, by a model's configuration; None: it names none."""
    found = (part.get(key) for part in _parts(config) for key in _EXPERT_KEYS)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A model's configuration, and what it holds of its parts."""
    return [config, *(value for value in config.values() if isinstance(value, dict))]


def allocator() -> dict[str, str]:
    """What has an engine on a CPU allocate memory by tcmalloc, where that is installed.

    glibc gives the memory of a large tensor back as soon as that is freed, and the next operation
    waits while the system clears as many pages again, on some ranks more than on others.
    """
    found = map(find_library, ("tcmalloc_minimal", "tcmalloc"))
    return {"LD_PRELOAD": name} if (name := next(filter(None, found), None)) else {}


def _configuration(model: str) -> dict[str, Any] | None:
    """The ``config.json`` of a local model; None where there is none here. Raises ConfigError."""
    try:
        return read_object(Path(model) / "config.json", "the model's configuration")
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise ConfigError(f"{error}; mend it or fetch the model again, or name another") from error
