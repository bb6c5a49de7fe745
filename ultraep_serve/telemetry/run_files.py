"""The files of a run: their names, the contents of the small ones, and how they are put back.

Whoever needs a file of a run asks ``RunFiles`` for it. Deleting files ends nothing: the process
that wrote one which others wait for puts it back, together with the directory (``hold``).
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from ultraep_serve.costs.model import CostModel
from ultraep_serve.errors import ConfigError, OutputError
from ultraep_serve.system.files import open_regular, write_whole
from ultraep_serve.telemetry.run_directory import hold, running_run_directories

__all__ = ["RunFiles"]

_MAX_CONFIG_BYTES = 1 << 20
_MAX_REASON_BYTES = 4096
_MAX_COSTS_BYTES = 4096
_NUMBERED = re.compile(r"(ring|spool|verification)-(0|[1-9]\d{0,3})")


class RunFiles:
    """The files in the run directory ``path``, which need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.control = path / "control"  # a ControlPage
        self.settings = path / "config.json"
        self.token = path / "token"  # of the sidecar
        self.link = path / "link"  # how other hosts are told why this one ends
        self.tuned = path / "tuned"  # a directory with an engine's tuned kernels
        self._lost = path / "lost"  # one line of text
        self._launched = path / "launched"  # empty
        self._stopped = path / "stopped"  # empty
        self._unbalanced = path / "unbalanced"  # one line of text
        self._costs = path / "costs.json"  # a CostModel

    def ring(self, number: int) -> Path:
        """The ring of the rank ``number``, counted over pipeline stages."""
        return self.path / f"ring-{number}"

    def spool(self, rank: int) -> Path:
        """The recorded routing of ``rank``."""
        return self.path / f"spool-{rank}"

    def verification(self, number: int) -> Path:
        """What the rank ``number`` saw when a sample failed: one JSON object."""
        return self.path / f"verification-{number}"

    def handshake(self, rank: int) -> Path:
        """How the other ranks of its domain reach the memory of ``rank``."""
        return self.path / f"handshake-{rank}.json"

    def socket(self, rank: int) -> Path:
        """Where ``rank`` hands out its GPU's memory."""
        return self.path / f"fabric-{rank}.socket"

    def stage(self, number: int) -> Path:
        """A directory in which the ranks of a later pipeline stage meet."""
        return self.path / f"stage-{number}"

    def domain(self, first_rank: int) -> Path:
        """A directory in which the ranks of a domain meet."""
        return self.path / f"domain-{first_rank}"

    def rings(self) -> list[int]:
        """The numbers of the rings that are there, sorted."""
        return self._numbers("ring")

    def spools(self) -> list[int]:
        """The ranks whose recorded routing is there, sorted."""
        return self._numbers("spool")

    def verifications(self) -> list[int]:
        """The numbers of the ranks that have left what they saw of a failed sample, sorted."""
        return self._numbers("verification")

    def _numbers(self, kind: str) -> list[int]:
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        found = filter(None, map(_NUMBERED.fullmatch, names))
        return sorted(int(match[2]) for match in found if match[1] == kind)

    def publish(self, path: Path, content: bytes) -> bool:
        """Leave ``content`` (0600) at ``path``, one of these files, where nothing is there.

        Whether it was left. Nothing is where the directory is gone. Raises OutputError.
        """
        if os.path.lexists(path):
            return False
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(content)
            os.link(temporary, path)  # when complete: nobody reads a part of it
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error}); make room there") from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def hold_again(self) -> None:
        """Make the directory again where it is gone, and hold it. Raises OSError."""
        if not self.path.exists():
            hold(self.path)

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

        Every rank that sees the reason ends, and tells other hosts.
        """
        if not self.lost_reason():
            write_whole(self._lost, reason.encode())

    def lost_reason(self) -> str:
        """Which rank or host was given up by the ranks of this run; empty while none is."""
        try:
            return _content(self._lost, _MAX_REASON_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def mark_launched(self) -> None:
        """Say to the ranks that there is a launcher, which tells other hosts of all endings."""
        self._launched.touch()

    def has_launcher(self) -> bool:
        """Whether a launcher started this run."""
        return self._launched.exists()

    def mark_stopped(self) -> None:
        """Say to the ranks that the launcher was asked to stop this host. Raises OSError."""
        self._stopped.touch()

    def is_stopped(self) -> bool:
        """Whether the launcher was asked to stop this host."""
        return self._stopped.exists()

    def mark_unbalanced(self, reason: str) -> None:
        """Leave for the sidecar why this server runs without balancing. Raises OutputError."""
        write_whole(self._unbalanced, " ".join(reason.split()).encode())

    def unbalanced(self, known: str = "") -> str:
        """Why the server runs without balancing; empty where nothing says so.

        ``known`` is the last answer. It stays where the file was deleted from a run that goes on.
        """
        try:
            text = _content(self._unbalanced, _MAX_REASON_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return known if known and self._is_running() else ""
        except OSError:
            return known
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

    def _is_running(self) -> bool:
        try:
            return self.path in running_run_directories()
        except OSError:  # no descriptor is left: nothing says that it has ended
            return True


def _content(path: Path, most: int) -> bytes:
    """The first ``most`` bytes of a regular file. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(most)
