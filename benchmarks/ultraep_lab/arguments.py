"""What the lab's commands have in common: flags of a running server and of results, and output."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field
from rich.console import Console, RenderableType

from ultraep_lab.outputs import prepare_output, write_json
from ultraep_serve.config import SidecarSettings
from ultraep_serve.errors import ConfigError, NoServerError
from ultraep_serve.system.environment import control_token_from_environment
from ultraep_serve.system.files import checked_token, read_text, read_token
from ultraep_serve.system.machine import is_here
from ultraep_serve.system.settings import Settings
from ultraep_serve.telemetry.run_directory import find_run
from ultraep_serve.telemetry.run_files import RunFiles

JsonFile = Annotated[  # what ``show`` gets
    Path | None,
    Field(description="write the result to FILE as JSON; - prints it instead of the table"),
    Field(validation_alias="json"),
]


class ServerFlags(Settings):
    """The addresses of a running server and its sidecar, and what ``control_token`` reads."""

    url: str = Field(
        default="http://127.0.0.1:8000",
        description="address of the engine's server",
        json_schema_extra={"metavar": "URL"},
    )
    sidecar: str = Field(
        default=f"http://127.0.0.1:{SidecarSettings().port_beside()}",
        description="address of its sidecar",
        json_schema_extra={"metavar": "URL"},
    )
    token_file: Path | None = Field(
        default=None,
        description="file with the sidecar's control token (default: $ULTRAEP_CONTROL_TOKEN, or "
        "the token of the server at --url where that and --sidecar are on this machine)",
    )


def control_token(server: ServerFlags) -> str | None:
    """The given token, or the one that a server on this machine left in its run directory.

    Raises ConfigError when its file cannot be read, or others could have written that directory.
    """
    if path := server.token_file:
        return checked_token(read_text(path, "--token-file"), f"--token-file {path}")
    return control_token_from_environment() or _local_token(server)


def _local_token(server: ServerFlags) -> str | None:
    """The token in a run directory here; nobody but a sidecar here is told it."""
    ports = []
    for flag, url in (("--url", server.url), ("--sidecar", server.sidecar)):
        try:
            address = urlsplit(url)
            ports.append(address.port)
        except ValueError as error:
            raise ConfigError(f"{flag} = {url!r} is not an address: {error}") from error
        if not address.hostname or not is_here(address.hostname):
            return None
    try:
        path = RunFiles(find_run(port=ports[0] or 0)).token
    except NoServerError:
        return None
    return read_token(path) if os.path.lexists(path) else None


def counted(number: int, singular: str, plural: str) -> str:
    """``number`` of something, in words."""
    return f"{number} {singular if number == 1 else plural}"


def prepare_outputs(*paths: Path | None) -> None:
    """Before the work, find out whether these can be written. Raises OutputError."""
    for path in paths:
        if path is not None and path != Path("-"):
            prepare_output(path)


def show(document: Mapping[str, Any], view: RenderableType, path: Path | None) -> None:
    """Write ``document`` where --json says, and print ``view`` for people."""
    if path == Path("-"):
        print(json.dumps(document, indent=2))
        return
    if path is not None:
        write_json(path, document)
    Console().print(view)
