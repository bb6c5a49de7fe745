"""The bearer token that opens the sidecar's control endpoints."""

from pathlib import Path

from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_private

_MAX_BYTES = 4096


def checked_token(text: str, source: str) -> str:
    """``text`` without white space around it.

    Raises ConfigError, which names ``source`` and shows no part of the text, where the rest could
    not be sent as a header: anything but visible ASCII characters.
    """
    token = text.strip()
    if len(token) > _MAX_BYTES or not all("!" <= character <= "~" for character in token):
        raise ConfigError(
            f"{source} must be one line of at most {_MAX_BYTES} visible ASCII characters, "
            "without spaces"
        )
    return token


def read_token(path: Path) -> str:
    """The token in ``path``, a file that nobody but this user can have written or can read.

    Raises ConfigError.
    """
    try:
        text = read_private(path, _MAX_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token in {path}: {error}") from error
    token = checked_token(text, str(path))
    if not token:
        raise ConfigError(f"{path} is empty; remove it, a new one will be made")
    return token
