"""The files of a run: their names, and the contents of the small ones.

Whoever needs a file of a run asks ``RunFiles`` for it. Where somebody deletes them while the server
runs, that serves on, and is not ready for whoever reads them.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import open_regular, write_whole

_MAX_CONFIG_BYTES = 1 << 20
_MAX_REASON_BYTES = 4096
_MAX_COSTS_BYTES = 4096
_RING = re.compile(r"ring-(0|[1-9]\d{0,3})")


class RunFiles:
    """The files in the run directory ``path``, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control = path / "control"  # a ControlPage
        self.settings = path / "config.json"
        self.token = path / "token"  # of the sidecar
        self.tuned = path / "tuned"  # a directory with an engine's tuned kernels
        self._lost = path / "lost"  # one line of text
        self._unbalanced = path / "unbalanced"  # one line of text
        self._costs = path / "costs.json"  # a CostModel

    def ring(self, number: int) -> Path:
        """The ring of the rank ``number``, counted over pipeline stages."""
        return self.path / f"ring-{number}"

    def verification(self, number: int) -> Path:
        """What the rank ``number`` saw when a sample failed: one JSON object."""
        return self.path / f"verification-{number}"

    def socket(self, rank: int) -> Path:
        """Where ``rank`` hands out its memory to the others of its domain."""
        return self.path / f"fabric-{rank}.socket"

    def stage(self, number: int) -> Path:
        """A directory in which the ranks of a later pipeline stage meet."""
        return self.path / f"stage-{number}"

    def rings(self) -> list[int]:
        """The numbers of the rings that are there, sorted."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return sorted(int(found[1]) for found in map(_RING.fullmatch, names) if found)

    def write_config(self, settings: str) -> None:
        """Leave the settings at start, as JSON. Raises OutputError."""
        write_whole(self.settings, settings.encode())

    def config(self) -> dict[str, Any] | None:
        """The settings at start without secrets; None where the file is missing or damaged."""
        try:
            settings = json.loads(_content(self.settings, _MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(settings, dict):
            return None
        return {key: value for key, value in settings.items() if "token" not in key.lower()}

    def give_up(self, reason: str) -> None:
        """Say to all processes of the run why it ends. The first reason stays. Raises OutputError.

        Every rank that sees the reason ends.
        """
        if not self.lost_reason():
            write_whole(self._lost, reason.encode())

    def lost_reason(self) -> str:
        """Which rank or host was given up by the ranks of this run; empty while none is."""
        try:
            return _content(self._lost, _MAX_REASON_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def mark_unbalanced(self, reason: str) -> None:
        """Leave for the sidecar why this server runs without balancing. Raises OutputError."""
        write_whole(self._unbalanced, " ".join(reason.split()).encode())

    def unbalanced(self) -> str:
        """Why the server runs without balancing; empty where nothing says so."""
        try:
            text = _content(self._unbalanced, _MAX_REASON_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return " ".join(text.split()) or "no reason is given"

    def write_costs(self, costs: CostModel) -> None:
        """Leave for the sidecar the costs by which is decided. Raises OutputError."""
        write_whole(self._costs, costs.to_json().encode())

    def costs(self) -> CostModel | None:
        """The costs by which is decided; None where the file is missing or damaged."""
        try:
            return CostModel.from_json(_content(self._costs, _MAX_COSTS_BYTES).decode())
        except (OSError, ValueError, ConfigError):
            return None


def _content(path: Path, most: int) -> bytes:
    """The first ``most`` bytes of a regular file. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)
