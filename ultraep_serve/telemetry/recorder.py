"""The writing end: what one rank did, one record per MoE layer of a batch.

``record`` runs on the host thread that launches kernels, so it fills one scratch record, checksums
it and writes it: a few microseconds, and no lock that another process could hold. A ring whose file
is deleted or truncated while serving is put back under its name within a second.
"""

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED

from ultraep_serve.balance.topology import Location, PipelineStage, process_namespace
from ultraep_serve.errors import RingError
from ultraep_serve.telemetry.run_directory import hold
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.telemetry.schema import (
    HEADER_BYTES,
    HEADER_DTYPE,
    MAX_CAPACITY,
    RECORD_HEAD,
    UNHEARD_BYTES,
    RingState,
    header_page,
    parse_header,
    record_checksum,
    record_dtype,
)
from ultraep_serve.telemetry.shared_file import SharedFile
from ultraep_serve.types import Decision, ExpertShape, Policy, Stage

__all__ = ["HEARTBEAT_SECONDS", "Recorder", "Stopwatch"]

HEARTBEAT_SECONDS = 1.0
_LOGGER = logging.getLogger(__name__)
_CRC = slice(8, 12)  # in a record
_POLICY_CODES = {policy: policy.code for policy in Policy}
_DECISIONS = {int(decision): decision for decision in Decision}
# What a wrong value from the caller raises, or a file without room; anything else is a bug worth
# seeing.
_REASONS_TO_LOSE = (
    struct.error,
    ValueError,
    TypeError,
    OverflowError,
    IndexError,
    KeyError,
    OSError,
)


def _word(name: str) -> int:
    """Index of a header field in the header seen as 64-bit words."""
    assert HEADER_DTYPE.fields is not None
    index, rest = divmod(HEADER_DTYPE.fields[name][1], 8)
    assert not rest
    return int(index)


_WRITTEN, _LOST, _HEARTBEAT = _word("written"), _word("lost"), _word("heartbeat_ns")
_STATE, _POLICY, _BATCHES = _word("state"), _word("policy"), _word("batches")
_RECORDED, _SKIPPED = _word("recorded_batches"), _word("skipped_batches")
_LAYERS, _STAGE_NS, _LAST_BATCH = _word("layers"), _word("stage_ns"), _word("last_batch_ns")
_SENT, _RECEIVED, _REPLICAS = _word("bytes_sent"), _word("bytes_received"), _word("replicas")


assert HEADER_DTYPE.fields is not None
_UNHEARD = HEADER_DTYPE.fields["unheard"][1]
_COUNTERS_END = 8 * _word("slot_bytes_reserved")
_ONLY_STAGE = PipelineStage()


class Recorder:
    """One rank's ring. Use ``Recorder.create``; every method may be called from any thread.

    No method raises because of the ring: a record that cannot be written is counted in ``lost``.
    """

    def __init__(self, path: Path, page: bytes) -> None:
        """Create the ring file at ``path`` with the header ``page``, and start its heartbeat."""
        header = parse_header(page, path.name)
        dtype = record_dtype(header.shape)
        self._capacity, self._record_bytes = header.capacity, header.record_bytes
        self._last_layer = header.num_layers - 1
        size = HEADER_BYTES + self._capacity * self._record_bytes
        try:
            self._file = SharedFile.create(path, page, size)
        except OSError as error:
            raise RingError(f"cannot create {path} ({size} bytes): {error}") from error
        # The header as this rank knows it, whatever happens to the file.
        self._page = memoryview(bytearray(page))
        self._counters, self._words = self._page[:_COUNTERS_END], self._page.cast("Q")
        self._at_heartbeat: list[Callable[[], None]] = [self._put_back]
        self._scratch = bytearray(self._record_bytes)
        self._scratch_view = memoryview(self._scratch)
        fields = np.frombuffer(self._scratch, dtype)[0]
        self._load_before, self._load_after = fields["load_before"], fields["load_after"]
        self._slot_expert, self._slot_load = fields["slot_expert"], fields["slot_load"]
        self._speed = fields["speed"]
        self._expert_load = fields["expert_load"]
        self.lost = 0  # records that could not be written
        self._written = 0
        self._batch = -1  # the batch that records are being written for
        self._counted = True  # whether it has been counted
        self._decision = Decision.PLANNED  # what it is counted as
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="ultraep-heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def create(
        cls,
        run_path: Path,
        rank: int,
        shape: ExpertShape,
        num_layers: int,
        ring_records: int,
        engine: str,
        mode: str,
        slot_bytes: int,
        timeout_seconds: float,
        location: Location | None = None,
        pipeline: PipelineStage = _ONLY_STAGE,
    ) -> "Recorder":
        """A new ring for ``rank`` in ``run_path`` (which exists), replacing an older one.

        ``mode`` is "tensor" or "data"; ``slot_bytes`` is the memory its replica slots reserve.
        Without ``location`` all ranks are on one host.
        Raises RingError when the file cannot be created or has no room.
        """
        if not 1 <= ring_records <= MAX_CAPACITY:
            raise RingError(f"{ring_records = } must be 1 to {MAX_CAPACITY}")
        page = header_page(
            shape,
            location or Location.on_one_host(rank, shape.num_ranks),
            pipeline_stage=pipeline.number,
            num_pipeline_stages=pipeline.num_stages,
            capacity=ring_records,
            num_layers=num_layers,
            pid=os.getpid(),
            process_namespace=process_namespace(),
            engine=engine,
            mode=mode,
            slot_bytes_reserved=slot_bytes,
            timeout_seconds=timeout_seconds,
            started_ns=time.time_ns(),
            heartbeat_ns=time.monotonic_ns(),
            state=RingState.STARTING,
            policy=Policy.OFF.code,
        )
        number = pipeline.number * shape.num_ranks + rank
        return cls(RunFiles(run_path).ring(number), page)

    def record(
        self,
        *,
        layer: int,
        batch: int,
        tokens: int,
        decision: Decision,
        policy: Policy,
        replicas: int,
        bytes_sent: int,
        bytes_received: int,
        stage_ns: Sequence[int] | NDArray[np.integer],
        load_before: NDArray[np.integer],
        load_after: NDArray[np.integer],
        slot_expert: NDArray[np.integer] | None,
        slot_load: NDArray[np.integer] | None = None,
        expert_load: NDArray[np.integer] | None = None,
        speed: NDArray[np.integer] | None = None,
        experts_ns: int = 0,
    ) -> None:
        """Write one layer of one batch.

        ``stage_ns`` holds a duration per Stage (0: did not run), ``load_*`` (R,) assignments per
        rank before and after balancing, ``slot_expert`` (R, S) the replicas (None: no replicas),
        ``slot_load`` (R, S) the assignments each computes, ``expert_load`` (E,) those of each
        logical expert (None: not known, written as zeros), ``speed`` (R,) those of the ranks (None:
        all equal), ``experts_ns`` what this rank's own experts took (0: not measured).
        """
        with self._lock:
            try:
                self._load_before[...] = load_before
                self._load_after[...] = load_after
                self._slot_expert[...] = -1 if slot_expert is None else slot_expert
                self._slot_load[...] = 0 if slot_load is None else slot_load
                self._expert_load[...] = 0 if expert_load is None else expert_load
                self._speed[...] = FULL_SPEED if speed is None else speed
                decision = _DECISIONS[decision]
                code = _POLICY_CODES[policy]
                seq = self._written + 1
                head = (seq, 0, layer, batch, time.time_ns(), tokens, replicas)
                assignments = int(np.add.reduce(self._load_before, dtype=np.int64))
                times = [int(time_ns) for time_ns in stage_ns]
                moved = (assignments, bytes_sent, bytes_received, experts_ns)
                RECORD_HEAD.pack_into(self._scratch, 0, *head, *moved, *times, decision, code)
                self._write(seq)
                self._accumulate(decision, replicas, bytes_sent, bytes_received, times)
                self._words[_POLICY] = code
                self._count_recorded(batch, layer, decision)
                self._file.write(self._counters)
            except _REASONS_TO_LOSE as error:
                self._lose(error)

    def count_batch(self, decision: Decision) -> None:
        """Count a batch that was skipped as a whole, without records."""
        with self._lock:
            try:
                decision = _DECISIONS[decision]
                self._finish_batch()
                words = self._words
                words[_BATCHES] += 1
                words[_LAST_BATCH] = time.monotonic_ns()
                words[_SKIPPED + decision] += 1
                words[_LAYERS + decision] += self._last_layer + 1
                if decision is Decision.POLICY_OFF:
                    words[_POLICY] = _POLICY_CODES[Policy.OFF]
                self._file.write(self._counters)
            except _REASONS_TO_LOSE as error:
                self._lose(error)

    def count_lost(self) -> None:
        """Count a record that the caller had no room for."""
        with self._lock:
            self._lose(BufferError("no room to keep it until the device had finished"))

    def set_state(self, state: RingState) -> None:
        """Publish the state of this rank; nothing happens after ``close``."""
        self._store(_STATE, state)

    def set_policy(self, policy: Policy) -> None:
        """Publish the policy in force until a batch does."""
        self._store(_POLICY, _POLICY_CODES[policy])

    @property
    def progress(self) -> int:
        """Another number after every batch, and after every layer that has a record."""
        return int(self._words[_BATCHES] + self._words[_WRITTEN])

    def fail(self, reason: str) -> None:
        """Publish that this rank has failed, and why, where ``set_unheard`` says nothing later."""
        self.set_unheard(reason)
        self.set_state(RingState.FAILED)

    def set_unheard(self, text: str) -> None:
        """Publish which ranks and hosts this one does not hear; empty: all are heard."""
        content = text.encode("ascii", "replace")[:UNHEARD_BYTES].ljust(UNHEARD_BYTES, b"\0")
        with self._lock:
            if self._words[_STATE] != RingState.FAILED:
                self._page[_UNHEARD : _UNHEARD + UNHEARD_BYTES] = content
                self._publish()

    def at_heartbeat(self, function: Callable[[], None]) -> None:
        """Call ``function`` once a second, off the path of batches.

        Where it raises, that is logged the first time.
        """
        self._at_heartbeat.append(function)

    def close(self) -> None:
        """Mark the ring stopped (a failed one stays failed) and close it; the file stays."""
        self._stopping.set()
        self._heart.join()
        with self._lock:
            self._finish_batch()
            if self._words[_STATE] != RingState.FAILED:
                self._words[_STATE] = RingState.STOPPED
            self._publish()
            self._file.close()

    def _publish(self) -> None:
        """Write the whole header; one that cannot be written is written at a later heartbeat."""
        if self._file.is_open:
            with contextlib.suppress(OSError):
                self._file.write(self._page)

    def _write(self, seq: int) -> None:
        checksum = record_checksum(seq, self._scratch_view)
        self._scratch[_CRC] = checksum.to_bytes(4, "little")
        place = (seq - 1) % self._capacity
        self._file.write(self._scratch, offset=HEADER_BYTES + place * self._record_bytes)
        self._words[_WRITTEN] = seq
        self._written = seq

    def _accumulate(
        self, decision: int, replicas: int, sent: int, received: int, times: list[int]
    ) -> None:
        words = self._words
        words[_LAYERS + decision] += 1
        words[_REPLICAS] += replicas
        words[_SENT] += sent
        words[_RECEIVED] += received
        for word, time_ns in enumerate(times, _STAGE_NS):
            if time_ns:
                words[word] += time_ns

    def _count_recorded(self, batch: int, layer: int, decision: Decision) -> None:
        """Count ``batch`` once: as planned if any layer was, else by its first layer's decision.

        Counters only ever grow, so a batch is counted at its first planned layer, at its last
        layer, or when the next batch begins.
        """
        if batch != self._batch:
            self._finish_batch()
            self._batch, self._decision, self._counted = batch, decision, False
        if not self._counted and decision == Decision.PLANNED:
            self._decision = decision
            self._finish_batch()
        elif layer >= self._last_layer:
            self._finish_batch()

    def _finish_batch(self) -> None:
        """Count the batch that records were last written for, unless it has been counted."""
        if self._counted:
            return
        self._words[_BATCHES] += 1
        self._words[_LAST_BATCH] = time.monotonic_ns()
        self._words[_RECORDED + self._decision] += 1
        self._counted = True

    def _store(self, word: int, value: int) -> None:
        with self._lock:
            if self._file.is_open:
                self._words[word] = value
                self._publish()

    def _lose(self, error: Exception) -> None:
        self.lost += 1
        self._words[_LOST] = self.lost
        if self.lost == 1:
            _LOGGER.warning("a record was lost (further ones are only counted): %r", error)

    def _beat(self) -> None:
        # Without the lock, so that a batch never waits for this thread; close() joins it first.
        logged = set()
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self._words[_HEARTBEAT] = time.monotonic_ns()
            self._publish()
            for function in self._at_heartbeat:
                try:
                    function()
                except Exception:  # a heart that stops would make others give this rank up
                    if function not in logged:
                        logged.add(function)
                        _LOGGER.exception("ultraep: failed at a heartbeat: %r", function)

    def _put_back(self) -> None:
        """Where the file was deleted or truncated while serving, be whole again under the name.

        A record that is written meanwhile waits for the copy, once.
        """
        with contextlib.suppress(OSError):  # no room: again at the next heartbeat
            if not self._file.is_whole():
                hold(self._file.path.parent)
                with self._lock:
                    self._file.put_back()
                    self._publish()


class Stopwatch:
    """Nanoseconds per stage, running from its creation on."""

    def __init__(self) -> None:
        self.nanoseconds = np.zeros(len(Stage), dtype=np.int64)
        self._last = time.perf_counter_ns()

    def lap(self, stage: Stage) -> None:
        """The time since the last lap went to ``stage``."""
        now = time.perf_counter_ns()
        self.nanoseconds[stage] += now - self._last
        self._last = now
