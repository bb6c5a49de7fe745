"""What the sidecar asks of the ranks, in one shared page that they read before each batch.

Policy, threshold and speeds are read by rank 0 only, which sends them to the others; whether to
record routing is read by every rank. Rank 0 also switches balancing off here, when it is in doubt.

The policy in force is ``off`` while in doubt; else that of a lease, while there is one; else the
one that was set. So the end of a lease changes nothing in the page, and needs nobody who is alive.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ultraep_serve.errors import ControlError
from ultraep_serve.telemetry.lease import Lease
from ultraep_serve.telemetry.run_directory import hold
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.shared_file import SharedFile
from ultraep_serve.types import Policy, SpeedSource

__all__ = ["ControlPage", "RecordLevel", "Recording"]

_MAGIC = b"UEPCTRL\x01"
_VERSION = 6
_PAGE_BYTES = 4096
_LAYOUT = struct.Struct("<8sQQQQQQQQQ")  # magic, version, and the words:
_SEQUENCE, _POLICY, _RECORDING, _THRESHOLD, _SPEEDS, _DOUBT, _LEASE, _LEASE_NUMBER = range(8)
_WORDS_AT, _WORDS = 16, struct.Struct("<8Q")
_HOLDER_AT, _HOLDER_BYTES = 128, 256  # the lease's holder, UTF-8, filled up with zeros
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
    """One policy with a sequence number that grows with every change, one lease, one threshold, one
    source of speeds, one recording, one doubt.

    Each is an aligned 64-bit word, read and written in one piece; one writer at a time.
    """

    def __init__(self, page: SharedFile) -> None:
        """Use ``page``. Raises ControlError where it is not a page of this version."""
        self._page = page
        self._last: Sequence[int] = ()  # the words when the page was last whole
        self._policy = self._check()

    def _check(self) -> Policy:
        with contextlib.suppress(OSError, struct.error):
            magic, version, *words = _LAYOUT.unpack(self._page.read(_LAYOUT.size))
            if magic == _MAGIC and version == _VERSION and words[_POLICY] < len(_POLICIES):
                self._last = words
                policy: Policy = _POLICIES[words[_POLICY]]
                return policy
        self._page.close()
        raise ControlError(f"{self._page.path} is not a control page of version {_VERSION}")

    def follow(self, *, put_back: bool) -> None:
        """Go on with the page that has the name, where the file was deleted while serving.

        One rank of a host calls this with ``put_back``: it makes a copy under the name again, and
        fills up a page that was truncated. Whatever the file is, this never raises; the page that
        was used then stays in use.
        """
        with contextlib.suppress(OSError, ControlError):
            try:
                is_named = self._page.is_named()
            except FileNotFoundError:
                is_named = put_back
            if not is_named:
                self._page.go_on_in(ControlPage.open(self._page.path.parent)._page)
            elif put_back and not self._page.is_whole():
                hold(self._page.path.parent)
                if len(self._page.read(_LAYOUT.size)) < _LAYOUT.size:  # it was truncated
                    self._page.write(_LAYOUT.pack(_MAGIC, _VERSION, *self._last))
                self._page.put_back()

    @classmethod
    def create(cls, run_path: Path, policy: Policy) -> "ControlPage":
        """A page in ``run_path`` (which exists), in place of an older one. Raises ControlError."""
        first = _LAYOUT.pack(_MAGIC, _VERSION, 0, policy.code, *[0] * 6)
        try:
            return cls(SharedFile.create(RunFiles(run_path).control, first, _PAGE_BYTES))
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    @classmethod
    def open_or_create(cls, run_path: Path, policy: Policy) -> "ControlPage":
        """The page in ``run_path``, made where there is none: several pipeline stages share it.

        Also where somebody has deleted all that was there. Raises ControlError.
        """
        files = RunFiles(run_path)
        if not os.path.lexists(files.control):
            with contextlib.suppress(OSError):
                files.hold_again()
            with contextlib.suppress(ControlError):  # another stage may be first
                return cls.create(run_path, policy)
        return cls.open(run_path)

    @classmethod
    def open(cls, run_path: Path) -> "ControlPage":
        """The page that is already in ``run_path``. Raises ControlError."""
        try:
            path = RunFiles(run_path).control
            return cls(SharedFile.open(path, _PAGE_BYTES, writable=True))
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    def _words(self) -> Sequence[int]:
        """The words of the page; where it was truncated, as they were when it was whole."""
        with contextlib.suppress(OSError, struct.error):
            self._last = _WORDS.unpack(self._page.read(_WORDS.size, _WORDS_AT))
        return self._last

    def _word(self, index: int) -> int:
        return self._words()[index]

    def _set(self, index: int, value: int) -> None:
        """Raises ControlError where the page cannot be written."""
        with self._errors_named():
            self._page.write(value.to_bytes(8, "little"), offset=_WORDS_AT + 8 * index)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ControlError(f"no control page: {error}") from error

    @property
    def policy(self) -> Policy:
        """The policy in force; where the page was damaged, the last valid one."""
        words = self._words()
        if words[_DOUBT]:
            return Policy.OFF
        lease = Lease.from_word(words[_LEASE])
        return lease.policy if lease else self._set_policy_of(words)

    @property
    def policy_without_lease(self) -> Policy:
        """The policy that is in force when no lease is; where damaged, the last valid one."""
        return self._set_policy_of(self._words())

    def _set_policy_of(self, words: Sequence[int]) -> Policy:
        if words[_POLICY] < len(_POLICIES):
            self._policy = _POLICIES[words[_POLICY]]
        return self._policy

    @property
    def sequence(self) -> int:
        """How many times the policy was set."""
        return self._word(_SEQUENCE)

    def set_policy(self, policy: Policy) -> int:
        """Put ``policy`` in force, and end a lease and a doubt. Return the new sequence number.

        Raises ControlError.
        """
        self._set(_LEASE, 0)
        self._set(_DOUBT, 0)
        return self._put_in_force(policy)

    @property
    def lease(self) -> Lease | None:
        """The lease in force; None where there is none, or it has ended, or all is in doubt.

        Raises ControlError.
        """
        words = self._words()
        if words[_DOUBT]:
            return None
        with self._errors_named():
            holder = self._page.read(_HOLDER_BYTES, _HOLDER_AT).rstrip(b"\0")
        return Lease.from_word(words[_LEASE], words[_LEASE_NUMBER], holder.decode(errors="replace"))

    def set_lease(self, lease: Lease | None) -> int:
        """Put ``lease`` in force in place of any other, or end it. Return as ``set_policy`` does.

        What was set before, also that all is in doubt, holds again when it ends. Raises
        ControlError.
        """
        if lease is None:
            self._set(_LEASE, 0)
            return self._count_change()
        if lease.number != self._word(_LEASE_NUMBER):
            self._set(_LEASE, 0)  # nobody reads one lease with the number of another
            holder = lease.holder.encode()[:_HOLDER_BYTES]
            with self._errors_named():
                self._page.write(holder.ljust(_HOLDER_BYTES, b"\0"), _HOLDER_AT)
            self._set(_LEASE_NUMBER, lease.number)
        self._set(_LEASE, lease.word)
        return self._count_change()

    @property
    def is_in_doubt(self) -> bool:
        """Whether balancing has switched itself off, and nobody has set a policy since."""
        return self._word(_DOUBT) != 0

    def switch_off_in_doubt(self) -> int:
        """Put ``off`` in force because a sample failed, also when a lease ends.

        Return as ``set_policy`` does.
        """
        self._set(_DOUBT, 1)
        self._set(_LEASE, 0)
        return self._put_in_force(Policy.OFF)

    def _put_in_force(self, policy: Policy) -> int:
        self._set(_POLICY, policy.code)
        return self._count_change()

    def _count_change(self) -> int:
        sequence = (self._word(_SEQUENCE) + 1) % (1 << 64)
        self._set(_SEQUENCE, sequence)
        return sequence

    @property
    def max_imbalance_millionths(self) -> int:
        """Millionths of the imbalance at or below which layers are left alone; 0: as configured."""
        return self._word(_THRESHOLD)

    def set_max_imbalance(self, max_imbalance: float | None) -> None:
        """Leave layers alone at or below ``max_imbalance`` (1.0 or more); None: as configured."""
        self._set(_THRESHOLD, 0 if max_imbalance is None else round(max_imbalance * _MILLION))

    @property
    def speeds(self) -> SpeedSource:
        """Where the speeds of ranks come from; where the page was damaged, as configured."""
        code = self._word(_SPEEDS)
        return _SOURCES[code] if code < len(_SOURCES) else SpeedSource.CONFIGURED

    def set_speeds(self, source: SpeedSource) -> None:
        """Take the speeds of ranks from ``source``."""
        self._set(_SPEEDS, source.code)

    @property
    def recording_word(self) -> int:
        """``Recording.word`` of the last request; a new number is a new recording."""
        return self._word(_RECORDING)

    def record(self, level: RecordLevel, max_bytes: int = 0) -> Recording:
        """Start a new recording, or with ``RecordLevel.OFF`` end the current one.

        Ranks follow when their next batch begins. Raises ValueError for a size out of range.
        """
        number = self.recording_word >> 32
        if level is not RecordLevel.OFF:
            if not _MIB <= max_bytes < _MIB << 24:
                raise ValueError(f"{max_bytes = } must be {_MIB} to {(_MIB << 24) - 1}")
            number = (number + 1) % (1 << 32)
        recording = Recording(number, level, max_bytes // _MIB * _MIB)
        self._set(_RECORDING, recording.word)
        return recording

    def close(self) -> None:
        """Close the page; the file stays."""
        self._page.close()

    def __enter__(self) -> "ControlPage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
