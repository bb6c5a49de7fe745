"""What the sidecar asks of the ranks: one shared page, which rank 0 reads before each batch.

Rank 0 sends what it reads to the others. It also switches balancing off here, when it is in doubt.
"""

import contextlib
import struct
from collections.abc import Sequence
from pathlib import Path

from ultraep_serve.errors import MORE_SHARED_MEMORY, ControlError
from ultraep_serve.system.files import SharedFile
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Policy

_MAGIC = b"UEPCTRL\x01"
_VERSION = 9
_PAGE_BYTES = 4096
_HEAD, _WORDS = struct.Struct("<8sQ"), struct.Struct("<3Q")  # magic and version; the words:
_POLICY, _DOUBT, _IDEAL = range(3)
_POLICIES: tuple[Policy, ...] = tuple(Policy)


class ControlPage:
    """One policy, one doubt, and whether the server was started for policy ideal.

    Each is an aligned 64-bit word, read and written in one piece; one writer at a time. What is
    read from a page that somebody has damaged is what it last held when it was whole.
    """

    def __init__(self, file: SharedFile) -> None:
        """Use ``file``. Raises ControlError where it is not a page of this version."""
        self.file = file
        self._words: Sequence[int] = (len(_POLICIES), 0, 0)  # when it was last whole
        head = b""
        with contextlib.suppress(OSError):
            head = file.read(_HEAD.size)
        if head != _HEAD.pack(_MAGIC, _VERSION) or self._read()[_POLICY] >= len(_POLICIES):
            file.close()
            raise ControlError(f"{file.path} is not a control page of version {_VERSION}")

    @classmethod
    def create(cls, run_path: Path, policy: Policy, *, allow_ideal: bool = False) -> "ControlPage":
        """A page in ``run_path`` (which exists); the one that is there already where there is one.

        Pipeline stages share a page. Raises ControlError.
        """
        words = _WORDS.pack(policy.code, 0, allow_ideal)
        path = RunFiles(run_path).control
        try:
            first = _HEAD.pack(_MAGIC, _VERSION) + words
            return cls(SharedFile.create(path, first, _PAGE_BYTES, replace=False))
        except FileExistsError:
            return cls.open(run_path)
        except OSError as error:
            problem = f"cannot create {path} ({error.strerror}); {MORE_SHARED_MEMORY}"
            raise ControlError(problem) from error

    @classmethod
    def open(cls, run_path: Path) -> "ControlPage":
        """The page that is already in ``run_path``. Raises ControlError."""
        try:
            path = RunFiles(run_path).control
            return cls(SharedFile.open(path, _PAGE_BYTES, writable=True))
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    def _read(self) -> Sequence[int]:
        with contextlib.suppress(OSError, struct.error):
            words = _WORDS.unpack(self.file.read(_WORDS.size, _HEAD.size))
            if words[_POLICY] < len(_POLICIES):
                self._words = words
        return self._words

    def _set(self, index: int, value: int) -> None:
        """Raises ControlError where the page cannot be written."""
        try:
            self.file.write(value.to_bytes(8, "little"), offset=_HEAD.size + 8 * index)
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    @property
    def policy(self) -> Policy:
        words = self._read()
        policy: Policy = _POLICIES[words[_POLICY]]
        return Policy.OFF if words[_DOUBT] else policy

    @property
    def allows_ideal(self) -> bool:
        """Whether the server was started to be measured with policy ideal."""
        return self._read()[_IDEAL] == 1

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force, and end a doubt.

        Raises ControlError, also for policy ideal where the server was not started for it.
        """
        if policy is Policy.IDEAL and not self.allows_ideal:
            raise ControlError(
                "policy 'ideal' gives wrong answers, for measuring; only a server that was started "
                "with --allow-ideal takes it"
            )
        self._set(_POLICY, policy.code)
        self._set(_DOUBT, 0)  # last: a change that breaks off leaves the doubt as it was

    @property
    def is_in_doubt(self) -> bool:
        """Whether balancing has switched itself off, and nobody has set a policy since."""
        return self._read()[_DOUBT] != 0

    def switch_off_in_doubt(self) -> None:
        """Put ``off`` in force because a sample failed. Raises ControlError.

        The doubt alone does it, so that no other process can see, or leave, one without the other.
        """
        self._set(_DOUBT, 1)

    def close(self) -> None:
        """Close the page; the file stays."""
        self.file.close()

    def __enter__(self) -> "ControlPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
