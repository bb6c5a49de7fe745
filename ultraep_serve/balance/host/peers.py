"""How a rank waits for the others of its host, and notices when they will not come any more."""

import os
import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.host.exchange import wait_flags

from ultraep_serve.errors import PeerTimeoutError
from ultraep_serve.system.topology import is_process_alive

_SPINS = 20_000  # looks at a flag before the core is offered to others, some tens of microseconds
_PATIENT_SECONDS = 2e-3  # waiting for longer than this sleeps instead of looking on
_NAP_SECONDS = 5e-5
_LIVENESS_SECONDS = 0.05  # between two looks at whether the other processes still exist


class Peers:
    """The ranks of a host, this one among them, that a rank waits for.

    Each of them has a flag, an epoch that only grows.
    """

    def __init__(self, rank: int, processes: Mapping[int, int], seconds: float) -> None:
        """``processes`` by rank, and the ``seconds`` that they are waited for."""
        self.rank = rank
        self.seconds = seconds
        self._processes = processes

    def wait(
        self, is_done: Callable[[int], bool], what: str, flags: NDArray[np.int64], epoch: int
    ) -> None:
        """Return once ``is_done(polls)``, which makes so many polls, is true.

        Looks on for some microseconds, then lets others have the core between looks, then naps:
        where ranks outnumber cores, the one waited for needs this one's. Raises PeerTimeoutError,
        about ``what``, where waiting longer cannot help: a rank died, or time is over. Of ``flags``
        (D,), addresses by rank, those that have not reached ``epoch`` say whose fault it is.
        """
        if is_done(_SPINS):
            return
        now = started = time.monotonic()
        next_liveness = started + _LIVENESS_SECONDS
        while True:
            if now - started < _PATIENT_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)
            now = time.monotonic()
            if is_done(_SPINS if now - started < _PATIENT_SECONDS else 1):
                return
            if now >= next_liveness:
                behind = [
                    rank
                    for rank, flag in zip(self._processes, flags, strict=True)
                    if not wait_flags(np.array([flag]), epoch, 1)
                ]
                self._require_peers(behind, is_done, what, now - started)
                next_liveness = now + _LIVENESS_SECONDS

    def _require_peers(
        self, behind: list[int], is_done: Callable[[int], bool], what: str, waited: float
    ) -> None:
        """Raise where waiting longer cannot help: a rank died, or time is over."""
        suspects = behind or list(self._processes)
        dead = [rank for rank in suspects if not is_process_alive(self._processes[rank])]
        timed_out = waited > self.seconds
        if not (dead or timed_out) or is_done(1):  # it may have answered before it ended
            return
        ranks = dead or behind
        culprit = f"rank {', '.join(map(str, ranks))}" if ranks else "another rank"
        reason = "has died" if dead else f"did not answer within {self.seconds:g} s"
        raise PeerTimeoutError(
            f"rank {self.rank} waits for {what}: {culprit} {reason}; restart the engine"
        )
