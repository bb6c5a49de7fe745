"""The control token: the operator's, or one made here and left where only its user can read it."""

import os
import secrets
from pathlib import Path

from ultraep_serve.config import control_token_from_environment
from ultraep_serve.errors import ConfigError
from ultraep_serve.files import open_regular
from ultraep_serve.launcher.run_directory import TOKEN_FILE

__all__ = ["control_token"]

_MAX_TOKEN_BYTES = 4096


def control_token(run_dir: Path) -> str:
    """The operator's token, else the one in ``run_dir/token``, else a new one written there.

    Raises ConfigError when the file cannot be written or cannot be trusted.
    """
    chosen = control_token_from_environment()
    if chosen:
        return chosen
    path = run_dir / TOKEN_FILE
    try:
        return _create(path)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _create(path: Path) -> str:
    token = secrets.token_urlsafe(32)
    # Linked into place complete: whoever finds the file finds all of it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        file.write(token)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink()
    return token


def _read(path: Path) -> str:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            token = file.read(_MAX_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others; remove it, a new one will be made")
    if not token:
        raise ConfigError(f"{path} is empty; remove it, a new one will be made")
    return token
