"""The policy in force, in one shared page: set by the sidecar, read by rank 0 before each batch."""

import struct
from pathlib import Path
from types import TracebackType

from ultraep_serve.errors import UltraEPError
from ultraep_serve.observability._files import create_mapped, map_shared
from ultraep_serve.types import Policy

__all__ = ["CONTROL_NAME", "ControlError", "ControlPage"]

CONTROL_NAME = "control"
_MAGIC = b"UEPCTRL\x01"
_VERSION = 1
_PAGE_BYTES = 4096
_LAYOUT = struct.Struct("<8sQQQ")  # magic, version, sequence, policy code
_SEQUENCE, _POLICY = 2, 3  # positions in the page seen as 64-bit words
_POLICIES: tuple[Policy, ...] = tuple(Policy)


class ControlError(UltraEPError):
    """The control page is missing or not one this version reads; the message names the file."""


class ControlPage:
    """One policy and a sequence number that grows with every change.

    Both are aligned 64-bit words, so each is read and written in one piece; one writer at a time.
    """

    def __init__(self, path: Path, *, create: Policy | None = None) -> None:
        """Map the page at ``path``, created anew where ``create`` names its first policy."""
        try:
            if create is None:
                self._page = map_shared(path, _PAGE_BYTES)
            else:
                first = _LAYOUT.pack(_MAGIC, _VERSION, 0, create.code)
                self._page = create_mapped(path, first, _PAGE_BYTES)
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error
        magic, version, _, code = _LAYOUT.unpack_from(self._page)
        if magic != _MAGIC or version != _VERSION or code >= len(_POLICIES):
            self._page.close()
            raise ControlError(f"{path} is not a control page of version {_VERSION}")
        self._words = memoryview(self._page).cast("Q")
        self._last: Policy = _POLICIES[code]

    @classmethod
    def create(cls, run_path: Path, policy: Policy) -> "ControlPage":
        """A new page in ``run_path`` (which exists). Raises ControlError."""
        return cls(run_path / CONTROL_NAME, create=policy)

    @classmethod
    def open(cls, run_path: Path) -> "ControlPage":
        """The page that is already in ``run_path``. Raises ControlError."""
        return cls(run_path / CONTROL_NAME)

    @property
    def policy(self) -> Policy:
        """The policy in force; where the page was damaged, the last legal one."""
        code = self._words[_POLICY]
        if code < len(_POLICIES):
            self._last = _POLICIES[code]
        return self._last

    @property
    def sequence(self) -> int:
        """How many times the policy was set."""
        return self._words[_SEQUENCE]

    def set_policy(self, policy: Policy) -> int:
        """Put ``policy`` in force; returns the new sequence number."""
        self._words[_POLICY] = policy.code
        self._words[_SEQUENCE] += 1
        return self._words[_SEQUENCE]

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._words.release()
        self._page.close()

    def __enter__(self) -> "ControlPage":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
