"""What the sidecar asks of the ranks, in one shared page that they read before each batch.

Policy, threshold and speeds are read by rank 0 only, which sends them to the others; whether to
record routing is read by every rank.
"""

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ultraep_serve.errors import ControlError
from ultraep_serve.system.files import create_mapped, map_shared
from ultraep_serve.telemetry.run_directory import hold, hold_again
from ultraep_serve.types import Policy, SpeedSource

__all__ = ["CONTROL_NAME", "ControlPage", "RecordLevel", "Recording"]

CONTROL_NAME = "control"
_MAGIC = b"UEPCTRL\x01"
_VERSION = 4
_PAGE_BYTES = 4096
# magic, version, sequence, policy code, recording, threshold, source of speeds
_LAYOUT = struct.Struct("<8sQQQQQQ")
# indices in the page seen as 64-bit words
_SEQUENCE, _POLICY, _RECORDING, _THRESHOLD, _SPEEDS = 2, 3, 4, 5, 6
_MIB = 1 << 20
_MILLION = 10**6
_POLICIES: tuple[Policy, ...] = tuple(Policy)
_SOURCES: tuple[SpeedSource, ...] = tuple(SpeedSource)


class RecordLevel(IntEnum):
    """How much of the routing to record."""

    OFF = 0
    LOADS = 1  # assignments per expert
    TOKENS = 2  # the experts of every token


@dataclass(frozen=True)
class Recording:
    """One recording. It is stored as one 64-bit word, so that a rank never sees half a change."""

    number: int  # of this recording, counted from 1; less than 2**32
    level: RecordLevel
    max_bytes: int  # of each spool; whole MiB, less than 2**24 of them

    @property
    def word(self) -> int:
        """Number in the high half, then MiB, level in the last byte."""
        return self.number << 32 | self.max_bytes // _MIB << 8 | self.level

    @classmethod
    def from_word(cls, word: int) -> "Recording":
        """The inverse of ``word``; a damaged level is read as off."""
        level = word & 0xFF
        known = RecordLevel(level) if level <= max(RecordLevel) else RecordLevel.OFF
        return cls(word >> 32, known, (word >> 8 & 0xFFFFFF) * _MIB)


class ControlPage:
    """One policy with a sequence number that grows with every change, one threshold, one source of
    speeds, one recording.

    Each is an aligned 64-bit word, read and written in one piece; one writer at a time.
    """

    def __init__(self, path: Path, *, create: Policy | None = None) -> None:
        """Map the page at ``path``; with ``create``, its first policy, make a new one.

        Raises ControlError where that fails, or the file is not a page of this version.
        """
        self._path = path
        try:
            if create is None:
                page = map_shared(path, _PAGE_BYTES)
            else:
                first = _LAYOUT.pack(_MAGIC, _VERSION, 0, create.code, 0, 0, 0)
                page = create_mapped(path, first, _PAGE_BYTES)
            self._use(page)
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    def _use(self, page: mmap.mmap) -> None:
        magic, version, _, code, *_ = _LAYOUT.unpack_from(page)
        if magic != _MAGIC or version != _VERSION or code >= len(_POLICIES):
            page.close()
            raise ControlError(f"{self._path} is not a control page of version {_VERSION}")
        self._last: Policy = _POLICIES[code]
        self._inode = os.stat(self._path).st_ino
        # The old views stay as they are: another thread may be reading one.
        self._page, self._words = page, memoryview(page).cast("Q")

    def follow(self, *, put_back: bool) -> None:
        """Go on with the page that now has the name, where the file was deleted while serving.

        One rank of a host calls this with ``put_back``: it makes a copy under the name again.
        Whatever the file is, this never raises; the old page then stays in use.
        """
        with contextlib.suppress(OSError, ControlError):
            try:
                inode = os.stat(self._path, follow_symlinks=False).st_ino
            except FileNotFoundError:
                if put_back:
                    hold(self._path.parent)
                    page = memoryview(self._page)
                    self._use(create_mapped(self._path, page, _PAGE_BYTES, replace=False))
                return
            if inode != self._inode:
                self._use(map_shared(self._path, _PAGE_BYTES))

    @classmethod
    def create(cls, run_path: Path, policy: Policy) -> "ControlPage":
        """A new page in ``run_path`` (which exists). Raises ControlError."""
        return cls(run_path / CONTROL_NAME, create=policy)

    @classmethod
    def open_or_create(cls, run_path: Path, policy: Policy) -> "ControlPage":
        """The page in ``run_path``, made where there is none: several pipeline stages share it.

        Also where somebody has deleted all that was there. Raises ControlError.
        """
        if not os.path.lexists(run_path / CONTROL_NAME):
            with contextlib.suppress(OSError):
                hold_again(run_path)
            with contextlib.suppress(ControlError):  # another stage may be first
                return cls.create(run_path, policy)
        return cls.open(run_path)

    @classmethod
    def open(cls, run_path: Path) -> "ControlPage":
        """The page that is already in ``run_path``. Raises ControlError."""
        return cls(run_path / CONTROL_NAME)

    @property
    def policy(self) -> Policy:
        """The policy in force; where the page was damaged, the last valid one."""
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

    @property
    def max_imbalance_millionths(self) -> int:
        """Millionths of the imbalance at or below which layers are left alone; 0: as configured."""
        return self._words[_THRESHOLD]

    def set_max_imbalance(self, max_imbalance: float | None) -> None:
        """Leave layers alone at or below ``max_imbalance`` (1.0 or more); None: as configured."""
        self._words[_THRESHOLD] = 0 if max_imbalance is None else round(max_imbalance * _MILLION)

    @property
    def speeds(self) -> SpeedSource:
        """Where the speeds of ranks come from; where the page was damaged, as configured."""
        code = self._words[_SPEEDS]
        return _SOURCES[code] if code < len(_SOURCES) else SpeedSource.CONFIGURED

    def set_speeds(self, source: SpeedSource) -> None:
        """Take the speeds of ranks from ``source``."""
        self._words[_SPEEDS] = source.code

    @property
    def recording_word(self) -> int:
        """``Recording.word`` of the last request; a new number is a new recording."""
        return self._words[_RECORDING]

    def record(self, level: RecordLevel, max_bytes: int = 0) -> Recording:
        """Start a new recording, or with ``RecordLevel.OFF`` end the current one.

        Ranks follow when their next batch begins. Raises ValueError for a size out of range.
        """
        number = self._words[_RECORDING] >> 32
        if level is not RecordLevel.OFF:
            if not _MIB <= max_bytes < _MIB << 24:
                raise ValueError(f"{max_bytes = } must be {_MIB} to {(_MIB << 24) - 1}")
            number = (number + 1) % (1 << 32)
        recording = Recording(number, level, max_bytes // _MIB * _MIB)
        self._words[_RECORDING] = recording.word
        return recording

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._words.release()
        self._page.close()

    def __enter__(self) -> "ControlPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
