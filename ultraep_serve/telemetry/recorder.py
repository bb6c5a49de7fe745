"""The writing end: what one rank did, one record per MoE layer of a batch, and its state.

Records are written without a lock that another process could hold, those of a batch in one go.
A ring whose file is deleted or truncated is written on: nobody sees it, and the log says so once.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ultraep_serve.errors import MORE_SHARED_MEMORY, RingError
from ultraep_serve.system.files import SharedFile
from ultraep_serve.system.topology import ONLY_STAGE, Location, PipelineStage, process_namespace
from ultraep_serve.telemetry import ring
from ultraep_serve.telemetry.record import LayerRecord, RecordArray, record_checksum, stored_record
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage, VerificationCheck

HEARTBEAT_SECONDS = 1.0
_LOGGER = logging.getLogger(__name__)
# What a wrong value from the caller raises, or a file without room; anything else is a bug worth
# seeing.
_REASONS_TO_LOSE = (ValueError, TypeError, OverflowError, OSError)
_AT = SimpleNamespace(**{name: at[1] for name, at in (ring.HEADER_DTYPE.fields or {}).items()})
_WORD = SimpleNamespace(**{name: offset // 8 for name, offset in vars(_AT).items()})
_UNHEARD = slice(_AT.unheard, _AT.unheard + ring.UNHEARD_BYTES)
_SELF_CHECK = slice(_AT.self_check, _AT.self_check + ring.SELF_CHECK_BYTES)


class Recorder:
    """One rank's ring. Use ``Recorder.create``; every method may be called from any thread.

    No method raises because of the ring: a record that cannot be written is counted in ``lost``.
    The header is kept here, whatever happens to the file. Its counters only ever grow.
    """

    def __init__(self, path: Path, page: bytes) -> None:
        """Create the ring file at ``path`` with the header ``page``, and start its heartbeat."""
        header = ring.parse_header(page, path.name)
        self._capacity, self._record_bytes = header.capacity, header.record_bytes
        size = ring.HEADER_BYTES + self._capacity * self._record_bytes
        try:
            self._file = SharedFile.create(path, page, size)
        except OSError as error:
            raise RingError(
                f"cannot create {path} ({size} bytes: {error.strerror}); {MORE_SHARED_MEMORY}"
            ) from error
        self._header = memoryview(bytearray(page))
        self._words = self._header.cast("Q")
        self._changing = self._header[: _AT.slot_bytes_reserved]  # with batches
        self._shape, self._num_layers = header.shape, header.num_layers
        self.lost = 0  # records that could not be written
        self.progress = 0  # another number after every batch, or layer, that ran
        self._watched = [self._file]
        self._at_heartbeat: list[Callable[[], None]] = [self._look_at_files]
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="ultraep-heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def create(
        cls,
        run_path: Path,
        location: Location,
        shape: ExpertShape,
        pipeline: PipelineStage = ONLY_STAGE,
        *,
        slot_bytes: int,
        ring_records: int = ring.RING_RECORDS,
        **server: Any,
    ) -> "Recorder":
        """Create the ring of the rank at ``location`` in ``run_path``, replacing an older one.

        It holds so many records. What it says of its ``server`` are fields of its header:
        ``num_layers``, ``engine`` and ``mode``. Raises RingError when the file cannot be created or
        has no room.
        """
        page = ring.header_page(
            shape,
            location,
            pipeline_stage=pipeline.number,
            num_pipeline_stages=pipeline.num_stages,
            capacity=ring_records,
            slot_bytes_reserved=slot_bytes,
            pid=os.getpid(),
            process_namespace=process_namespace(),
            started_ns=time.time_ns(),
            heartbeat_ns=time.monotonic_ns(),
            state=ring.RingState.STARTING,
            policy=Policy.OFF.code,
            **server,
        )
        number = pipeline.number * shape.num_ranks + location.rank
        return cls(RunFiles(run_path).ring(number), page)

    def record_batch(self, layers: LayerRecord, number: int, time_ns: int | None = None) -> None:
        """Write a batch of so many ``layers``, which ended at ``time_ns``, or now."""
        with self._counting(number):
            self._write(stored_record(layers, self._shape, number), time_ns)

    def _write(self, stored: RecordArray, time_ns: int | None) -> None:
        first, size = self._words[_WORD.written], self._record_bytes
        stored["time_ns"] = time.time_ns() if time_ns is None else time_ns
        stored["seq"] = np.arange(first + 1, first + 1 + len(stored))
        rows = stored.view(np.uint8).reshape(-1, size)
        stored["crc"] = [record_checksum(seq, row.data) for seq, row in enumerate(rows, first + 1)]
        place = first % self._capacity
        for part in np.split(rows, range(self._capacity - place, len(rows), self._capacity)):
            self._file.write(part.reshape(-1).data, ring.HEADER_BYTES + place * size)
            place = 0
        self._count(stored)

    def count_batch(self, decision: Decision) -> None:
        """Count a batch that was skipped as a whole, without records."""
        with self._counting():
            words, decision = self._words, Decision(decision)
            self._count_one(_WORD.skipped_batches + decision)
            words[_WORD.layers + decision] += self._num_layers
            if decision is Decision.POLICY_OFF:
                words[_WORD.policy] = Policy.OFF.code

    def count_verified(self, check: VerificationCheck, nanoseconds: int) -> None:
        """Count a layer that was checked, which took ``nanoseconds``.

        Readers see it with the next record, batch or heartbeat.
        """
        with self._lock, contextlib.suppress(*_REASONS_TO_LOSE):
            self._words[_WORD.verified_layers + VerificationCheck(check)] += 1
            self._words[_WORD.verification_ns] += nanoseconds

    def count_verification_failure(self, check: VerificationCheck) -> None:
        """Count, beside ``count_verified``, a check that found something wrong."""
        with self._publishing(), contextlib.suppress(*_REASONS_TO_LOSE):
            self._words[_WORD.verification_failures + VerificationCheck(check)] += 1

    def set_state(self, state: ring.RingState) -> None:
        """Publish the state of this rank; nothing happens after ``close``."""
        with self._publishing():
            if self._file.is_open:
                self._words[_WORD.state] = state

    def set_policy(self, policy: Policy) -> None:
        """Publish the policy in force until a batch does."""
        with self._publishing():
            self._words[_WORD.policy] = policy.code

    def fail(self, reason: str) -> None:
        """Publish that this rank has failed, and why, where ``set_unheard`` says nothing later."""
        self.set_unheard(reason)
        self.set_state(ring.RingState.FAILED)

    def set_unheard(self, text: str) -> None:
        """Publish which ranks and hosts this one does not hear; empty: all are heard."""
        content = text.encode("ascii", errors="replace")[: ring.UNHEARD_BYTES]
        with self._publishing():
            if not self._has_failed:
                self._header[_UNHEARD] = content.ljust(ring.UNHEARD_BYTES, b"\0")

    def set_self_check(self, found: ring.SelfCheck) -> None:
        """Publish what the self-check at start has found."""
        content = found.to_json(ring.SELF_CHECK_BYTES).encode("ascii")
        with self._publishing():
            self._header[_SELF_CHECK] = content.ljust(ring.SELF_CHECK_BYTES, b"\0")

    def at_heartbeat(self, function: Callable[[], None]) -> None:
        """Call ``function`` once a second, off the path of batches.

        Where it raises, that is logged the first time.
        """
        self._at_heartbeat.append(function)

    def watch(self, file: SharedFile) -> None:
        """Say in the log, once, if somebody deletes, replaces or truncates ``file``, or the ring.

        ``file`` stays open until ``close``.
        """
        self._watched.append(file)

    def close(self) -> None:
        """Mark the ring stopped (a failed one stays failed) and close it; the file stays."""
        self._stopping.set()
        self._heart.join()
        with self._publishing():
            if not self._has_failed:
                self._words[_WORD.state] = ring.RingState.STOPPED
        self._file.close()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def _has_failed(self) -> bool:
        return bool(self._words[_WORD.state] == ring.RingState.FAILED)

    @contextlib.contextmanager
    def _counting(self, records: int = 1) -> Iterator[None]:
        """Write what changes with batches; where that or the block fails, records are lost."""
        with self._lock:
            try:
                yield
                self._file.write(self._changing)
            except _REASONS_TO_LOSE as error:
                if not self.lost:
                    _LOGGER.warning("a record was lost (further ones are only counted): %r", error)
                self.lost += records
                self._words[_WORD.lost] += records

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Write the header; one that cannot be written is written at a later heartbeat."""
        with self._lock:
            yield
            self._publish()

    def _publish(self) -> None:
        if self._file.is_open:
            with contextlib.suppress(OSError):
                self._file.write(self._header)

    def _count(self, stored: RecordArray) -> None:
        """Count what was written, the layers of one batch.

        The batch counts as planned if any layer was, else by its first layer's decision.
        """
        words, decisions = self._words, stored["decision"]
        numbers = np.bincount(decisions, minlength=len(Decision)).tolist()
        layers = dict(zip(Decision, numbers, strict=True))
        words[_WORD.written] += len(stored)
        for decision, number in layers.items():
            words[_WORD.layers + decision] += number
        for word in ("replicas", "bytes_sent", "bytes_received"):
            words[getattr(_WORD, word)] += int(stored[word].sum())
        words[_WORD.copied] += int(np.count_nonzero(stored["is_copied"]))
        for place, time_ns in enumerate(stored["stage_ns"].sum(axis=0).tolist(), _WORD.stage_ns):
            words[place] += time_ns
        words[_WORD.policy] = int(stored["policy"][-1])
        decision = Decision.PLANNED if layers[Decision.PLANNED] else Decision(decisions[0])
        self._count_one(_WORD.recorded_batches + decision)

    def _count_one(self, word: int) -> None:
        """Count a batch, in ``word`` too."""
        self._words[_WORD.batches] += 1
        self._words[_WORD.last_batch_ns] = time.monotonic_ns()
        self._words[word] += 1
        self.progress += 1

    def _beat(self) -> None:
        # Without the lock, so that a batch never waits for this thread; close() joins it first.
        logged: set[Callable[[], None]] = set()
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self._words[_WORD.heartbeat_ns] = time.monotonic_ns()
            self._publish()
            for function in self._at_heartbeat:
                try:
                    function()
                except Exception:  # a heart that stops would make others give this rank up
                    if function not in logged:
                        logged.add(function)
                        _LOGGER.exception("ultraep: failed at a heartbeat: %r", function)

    def _look_at_files(self) -> None:
        """Say in the log, once, that somebody has deleted, replaced or truncated one of them."""
        for file in self._watched:
            if damage := file.damage():
                self._watched = []
                _LOGGER.warning(
                    "ultraep: %s was %s; this server serves on, but its state and its policy are "
                    "out of reach until it is restarted",
                    file.path,
                    damage,
                )
                return


class Stopwatch:
    """Nanoseconds per stage, running from its creation on."""

    def __init__(self) -> None:
        self.nanoseconds = [0] * len(Stage)
        self._last = time.perf_counter_ns()

    def lap(self, stage: Stage) -> None:
        """The time since the last lap went to ``stage``."""
        now = time.perf_counter_ns()
        self.nanoseconds[stage] += now - self._last
        self._last = now

    def leave_out(self) -> None:
        """The time since the last lap went to no stage."""
        self._last = time.perf_counter_ns()
