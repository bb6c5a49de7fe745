"""A ring's header as its writer knows it, whatever happens to the file: state and counters."""

import time

from ultraep_serve.telemetry.record import LayerRecord
from ultraep_serve.telemetry.schema import (
    HEADER_DTYPE,
    SELF_CHECK_BYTES,
    UNHEARD_BYTES,
    RingState,
)
from ultraep_serve.telemetry.self_check import SelfCheck
from ultraep_serve.types import Decision, Policy, VerificationCheck

__all__ = ["RingCounters"]


def _offset(name: str) -> int:
    """The offset of a header field, in bytes."""
    assert HEADER_DTYPE.fields is not None
    return int(HEADER_DTYPE.fields[name][1])


def _word(name: str) -> int:
    """Index of a header field in the header seen as 64-bit words."""
    index, rest = divmod(_offset(name), 8)
    assert not rest
    return index


_WRITTEN, _LOST, _HEARTBEAT = _word("written"), _word("lost"), _word("heartbeat_ns")
_STATE, _POLICY, _BATCHES = _word("state"), _word("policy"), _word("batches")
_RECORDED, _SKIPPED = _word("recorded_batches"), _word("skipped_batches")
_LAYERS, _STAGE_NS, _LAST_BATCH = _word("layers"), _word("stage_ns"), _word("last_batch_ns")
_SENT, _RECEIVED, _REPLICAS = _word("bytes_sent"), _word("bytes_received"), _word("replicas")
_VERIFIED, _FAILURES = _word("verified_layers"), _word("verification_failures")
_VERIFICATION_NS = _word("verification_ns")
_UNHEARD = slice(_offset("unheard"), _offset("unheard") + UNHEARD_BYTES)
_SELF_CHECK = slice(_offset("self_check"), _offset("self_check") + SELF_CHECK_BYTES)
_COUNTERS_END = _offset("slot_bytes_reserved")


class RingCounters:
    """The header page. Counters only ever grow; a batch is counted once.

    A batch counts as planned if any layer was, else by its first layer's decision: at its first
    planned layer, at its last layer, or when the next batch begins.
    """

    def __init__(self, page: bytes, num_layers: int) -> None:
        self.page = memoryview(bytearray(page))
        self.counters = self.page[:_COUNTERS_END]  # what changes with batches
        self._words = self.page.cast("Q")
        self._num_layers = num_layers
        self._batch = -1  # that records are being written for
        self._is_counted = True
        self._decision = Decision.PLANNED  # what it is counted as

    @property
    def written(self) -> int:
        """Records written."""
        return self._words[_WRITTEN]

    @property
    def progress(self) -> int:
        """Another number after every batch, and after every layer that has a record."""
        return self._words[_BATCHES] + self._words[_WRITTEN]

    @property
    def has_failed(self) -> bool:
        """Whether the rank has failed, which is its last state."""
        return self._words[_STATE] == RingState.FAILED

    def beat(self) -> None:
        """The rank is alive."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def lose(self) -> None:
        """A record was lost."""
        self._words[_LOST] += 1

    def set_state(self, state: RingState) -> None:
        """The rank's state."""
        self._words[_STATE] = state

    def set_policy(self, code: int) -> None:
        """The policy in force."""
        self._words[_POLICY] = code

    def set_unheard(self, text: str) -> None:
        """Which ranks and hosts are not heard, or why the rank has failed."""
        content = text.encode("ascii", "replace")[:UNHEARD_BYTES]
        self.page[_UNHEARD] = content.ljust(UNHEARD_BYTES, b"\0")

    def set_self_check(self, found: SelfCheck) -> None:
        """What the self-check at start has found."""
        content = found.to_json(SELF_CHECK_BYTES).encode("ascii")
        self.page[_SELF_CHECK] = content.ljust(SELF_CHECK_BYTES, b"\0")

    def count_verified(self, check: VerificationCheck, nanoseconds: int) -> None:
        """A layer was checked, which took ``nanoseconds``."""
        self._words[_VERIFIED + VerificationCheck(check)] += 1
        self._words[_VERIFICATION_NS] += nanoseconds

    def count_verification_failure(self, check: VerificationCheck) -> None:
        """What was checked was wrong."""
        self._words[_FAILURES + VerificationCheck(check)] += 1

    def count_record(self, record: LayerRecord) -> None:
        """``record`` was written."""
        words, decision = self._words, Decision(record.decision)
        words[_WRITTEN] += 1
        words[_LAYERS + decision] += 1
        words[_REPLICAS] += record.replicas
        words[_SENT] += record.bytes_sent
        words[_RECEIVED] += record.bytes_received
        for word, time_ns in enumerate(record.stage_ns, _STAGE_NS):
            if time_ns:
                words[word] += int(time_ns)
        words[_POLICY] = record.policy
        if record.batch != self._batch:
            self.finish_batch()
            self._batch, self._decision, self._is_counted = record.batch, decision, False
        if not self._is_counted and decision is Decision.PLANNED:
            self._decision = decision
            self.finish_batch()
        elif record.layer >= self._num_layers - 1:
            self.finish_batch()

    def count_batch(self, decision: Decision) -> None:
        """A batch was skipped as a whole, without records."""
        decision = Decision(decision)
        self.finish_batch()
        words = self._words
        words[_BATCHES] += 1
        words[_LAST_BATCH] = time.monotonic_ns()
        words[_SKIPPED + decision] += 1
        words[_LAYERS + decision] += self._num_layers
        if decision is Decision.POLICY_OFF:
            words[_POLICY] = Policy.OFF.code

    def finish_batch(self) -> None:
        """Count the batch that records were last written for, unless it has been counted."""
        if self._is_counted:
            return
        self._words[_BATCHES] += 1
        self._words[_LAST_BATCH] = time.monotonic_ns()
        self._words[_RECORDED + self._decision] += 1
        self._is_counted = True
