"""What several commands take: texts that list things, tokens, cost models, packages they need."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from ultraep_serve.config import control_token_from_environment
from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.launcher.run_directory import TOKEN_FILE, run_directory_of_port

__all__ = [
    "DEFAULT",
    "add_token_arguments",
    "control_token",
    "listed",
    "prompt_lengths",
    "read_costs",
    "require_packages",
]

DEFAULT = "default: %(default)s"  # argparse fills it in


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that ``control_token`` reads, beside ``--url``."""
    token = parser.add_mutually_exclusive_group()
    token.add_argument(
        "--token",
        help="the sidecar's control token (default: ULTRAEP_CONTROL_TOKEN, or the local server's)",
    )
    token.add_argument("--token-file", type=Path, help="a file that holds the control token")


def control_token(arguments: argparse.Namespace) -> str | None:
    """The given token, or the one that a server on this machine left in its run directory.

    Raises ConfigError when its file cannot be read.
    """
    if token := arguments.token or control_token_from_environment():
        return str(token)
    path = arguments.token_file or _local_token_file(arguments.url)
    if path is None:
        return None
    try:
        return str(path.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {error}") from error


def _local_token_file(url: str) -> Path | None:
    port = urlsplit(url).port
    path = run_directory_of_port(port) / TOKEN_FILE if port else None
    return path if path is not None and path.exists() else None


def listed(text: str) -> list[str]:
    """The names in ``text``, which commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def prompt_lengths(text: str) -> tuple[int, ...]:
    """The value of ``--prompt-tokens``. Raises ConfigError where it lists no numbers."""
    try:
        return tuple(int(number) for number in listed(text))
    except ValueError:
        raise ConfigError(f"--prompt-tokens = {text!r} must be numbers, as in 2048,4096") from None


def read_costs(path: Path) -> CostModel:
    """The cost model in the file that ``--costs`` names. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--costs {path} cannot be read: {error}") from error
    return CostModel.from_json(text)


def require_packages(*names: str) -> None:
    """Raises ConfigError where one of ``names``, of the client extra, is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; run `pip install ultraep-serve[client]`")
