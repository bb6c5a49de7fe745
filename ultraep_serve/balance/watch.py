"""Which hosts are still there: the first rank of each beats in the engine's key-value store.

The exchange of loads gives a lost rank up by itself; the engine's own collectives may wait for half
an hour, and without a batch nobody waits. So a thread sets this host's beat once a second and reads
those of the others; the store stands still for a host that does not reach it. The heartbeat of the
ring shows who is not heard, and ends this process where that lasts for the timeout. Every rank of a
host ends with its first, and with the engine's first process: vLLM's own would outlive its server.
A GPU's kernels wait where no process is looked at, so ranks in the same domain are watched here.

What is no silence:

- A batch that goes on needs every rank of the group, so it counts as hearing all of them.
- Silence is counted in the watcher's own steps, each of which is short: a watcher that was stopped
  itself, or a machine that was suspended, gives the others as much time as it had before.
- A host that never beat has not loaded yet.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

from torch.distributed.distributed_c10d import Store

from ultraep_serve.errors import UltraEPError
from ultraep_serve.system.refusals import say
from ultraep_serve.system.topology import Location, PipelineStage, is_process_alive, process_state
from ultraep_serve.telemetry.recorder import HEARTBEAT_SECONDS, Recorder
from ultraep_serve.telemetry.run_files import RunFiles

WATCH_SECONDS = 3.0  # beyond the timeout, at most, in which a lost host is given up

_QUIET_SECONDS = 4.0  # of silence before it is shown
_LONGEST_STEP = 2 * HEARTBEAT_SECONDS
_DEAD_SECONDS = 4.0  # between the end of a neighbour and this process's
_GRACE_SECONDS = 2.0  # for the other ranks of this host to learn the reason


class HostBeats:
    """A thread that beats for this host, and reads what the others beat."""

    def __init__(self, store: Store, location: Location, stage: PipelineStage) -> None:
        """Hosts are told apart by pipeline stage: each stage has hosts of its own."""
        size = location.host_size
        ranks = _ranks(location.host)
        of_stage = f" of pipeline stage {stage.number}" if stage.num_stages > 1 else ""
        self._name = f"host {os.uname().nodename} ({ranks}{of_stage})"
        places = product(range(stage.num_stages), range(location.num_ranks // size))
        self._keys = {place: f"ultraep-beat-{place[0]}-{place[1]}" for place in places}
        self._own = self._keys.pop((stage.number, location.rank // size))
        self.heard: dict[tuple[int, int], str] = {}  # the last beat of others: a number, a name
        self._store, self._stopping = store, threading.Event()
        threading.Thread(target=self._beat, name="ultraep-beats", daemon=True).start()

    def stop(self) -> None:
        self._stopping.set()

    def _beat(self) -> None:
        store, number = None, 0
        while not self._stopping.wait(HEARTBEAT_SECONDS if number else 0):
            number += 1
            try:
                # a connection of its own, of which torch's types do not tell
                store = store or self._store.clone()  # type: ignore[attr-defined]
                store.set(self._own, f"{number} {self._name}")
                for place, key in self._keys.items():
                    if store.check([key]):
                        self.heard[place] = store.get(key).decode()
            except RuntimeError:  # perhaps for once; where the store is gone, nobody is heard
                store = None


@dataclass(eq=False)
class Watch:
    """What one rank knows of others; ``look`` is called at every heartbeat of its ring."""

    files: RunFiles
    recorder: Recorder
    seconds: float  # after which hosts are given up, which may change
    server: int  # the process without which this one ends, if it can be seen from here
    beats: HostBeats | None = None  # None: there are no other hosts
    # processes by rank, 0 where one cannot be seen, without which this one would wait for nothing
    # while it is waiting
    neighbours: Mapping[int, int] = field(default_factory=dict)
    is_waiting: Callable[[], bool] = lambda: True
    # ends this process: its main thread may hang where no exception reaches it
    end: Callable[[int], object] = os._exit

    def __post_init__(self) -> None:
        self._server = self.server if is_process_alive(self.server) else os.getpid()
        self._last: dict[tuple[int, int], str] = {}
        self._silence: dict[tuple[int, int], float] = {}
        self._looked, self._progress, self._is_over = time.monotonic(), 0, False
        self._gone = 0.0  # seconds since a neighbour has ended

    def look(self) -> None:
        """Hear the others, show who is not heard, and end this process where one is given up."""
        if self._is_over:
            return
        now = time.monotonic()
        step, self._looked = min(now - self._looked, _LONGEST_STEP), now
        progresses = self._progress != self.recorder.progress
        self._progress = self.recorder.progress
        heard = dict(self.beats.heard) if self.beats is not None else {}
        for place, beat in heard.items():
            is_heard = progresses or beat != self._last.get(place)
            self._silence[place] = 0.0 if is_heard else self._silence[place] + step
        self._last = heard
        names = {place: beat.partition(" ")[2] for place, beat in heard.items()}
        said = [
            f"{names[place]} was not heard for {seconds:.0f} s"
            for place, seconds in self._silence.items()
            if seconds >= _QUIET_SECONDS
        ]
        # vLLM's EngineCore is above its ranks, which live and beat while nobody gives them batches.
        states = {process: process_state(process) for process in (self._server, os.getppid())}
        stopped = [process for process, state in states.items() if state in "Tt"]
        said += [f"the engine's process {process} is stopped" for process in stopped]
        own = {rank: process for rank, process in self.neighbours.items() if process}
        dead = [rank for rank, process in own.items() if not is_process_alive(process)]
        dead = dead if dead and self.is_waiting() else []  # else it may have come to its end
        said += [f"rank {rank} has died" for rank in dead]
        self._gone = self._gone + step if dead else 0.0
        self.recorder.set_unheard("; ".join(said))
        reason = self.files.lost_reason()
        if max(self._silence.values(), default=0.0) > self.seconds:
            reason = reason or f"{'; '.join(said)}; restart the engine on all hosts"
        if self._gone > _DEAD_SECONDS:  # where all are ending, this one has been ended by now
            reason = reason or f"{'; '.join(said)}; restart the engine"
        if reason:
            self._give_up(reason)
        elif states[self._server] in "ZX":  # another server's ranks may go on, or end by themselves
            self._give_up(f"the engine's first process ({self._server}) has ended", is_shared=False)

    def _give_up(self, reason: str, *, is_shared: bool = True) -> None:
        self._is_over = True
        latest = threading.Timer(2 * _GRACE_SECONDS, self.end, (1,))  # a full log pipe may block
        latest.daemon = True
        latest.start()
        try:
            with contextlib.suppress(OSError, UltraEPError):  # no room for the file
                if is_shared:
                    self.files.give_up(reason)
            self.recorder.set_unheard(reason)
            say(f"ends: {reason}", is_error=True)
            time.sleep(_GRACE_SECONDS)
        finally:
            latest.cancel()
            self.end(1)


def _ranks(numbers: range) -> str:
    first, last = numbers[0], numbers[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
