"""A server and two ranks in an engine's place: they load, serve batches, follow the policy, end.

    python -m tests.faults.engine BOARD SIDECAR_PORT

Ranks meet in every batch, and wait for each other as long as the engine's own collectives do. The
server ends all where a rank is gone, and ranks end with the server, as engines have it. A stage has
begun when its file is on BOARD, and goes on when the injector leaves ``may-...`` there.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

from tests.support.ring_files import create
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.run import start_beside_rank
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry import recorder as recorders
from ultraep_serve.telemetry import run_directory
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.ring import RingState
from ultraep_serve.telemetry.run_directory import RunDirectory, name_of_run
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import Decision, ExpertShape, Policy

NUM_RANKS = 2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BATCH_SECONDS = 0.05


def wait_for(path: Path) -> None:
    """Until the injector has left ``path``."""
    while not path.exists():
        time.sleep(0.01)


def run_path(server: int) -> Path:
    """The run directory of the process ``server``."""
    return run_directory._path_of(name_of_run(server, 0))


def _meet(rank: int, server: int, config: BalanceConfig) -> Path:
    """As ranks of an engine do; the first one starts the sidecar."""
    if rank == 0:
        directory = RunDirectory.create(name_of_run(server, 0))
    else:
        wait_for(RunFiles(run_path(server)).settings)
        directory = RunDirectory.join(name_of_run(server, 0))
    Finalize(None, directory.leave, exitpriority=0)
    if rank == 0:
        RunFiles(directory.path).write_config(config.to_json())
        assert config.sidecar is not None
        start_beside_rank(directory.path, config.sidecar)
    return directory.path


def _rank(rank: int, board: Path, config: BalanceConfig, batches: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    home, timeout = _meet(rank, os.getppid(), config), config.timeout_seconds
    location = Location.on_one_host(rank, NUM_RANKS)
    recorder = create(home, rank, ExpertShape(NUM_RANKS, 8, 1), location, num_layers=1)
    Finalize(None, recorder.close, exitpriority=1)
    page = ControlPage.create(home, Policy.QUOTA) if rank == 0 else None
    if page is not None:
        recorder.watch(page.file)
    signal.signal(signal.SIGTERM, _end)
    (board / f"loading-{rank}").write_text(str(os.getpid()))
    wait_for(board / "may-load")
    recorder.set_state(RingState.READY)
    (board / f"serving-{rank}").touch()
    while True:
        _meet_others(batches, rank, timeout)
        if page is not None:
            recorder.set_policy(page.policy)
        recorder.count_batch(Decision.SMALL)
        time.sleep(_BATCH_SECONDS)


def _meet_others(batches: Any, rank: int, timeout: float) -> None:
    """Begin a batch when all have; a rank that is stopped holds no lock that others wait for."""
    batches[rank] += 1
    deadline = time.monotonic() + timeout
    while min(batches) < batches[rank]:
        if time.monotonic() > deadline:
            raise TimeoutError("a rank does not come")
        time.sleep(0.001)


def _end(*_: object) -> None:
    raise SystemExit


def main() -> None:
    board, sidecar_port = Path(sys.argv[1]), int(sys.argv[2])
    patches = pytest.MonkeyPatch()
    patches.setattr(recorders, "HEARTBEAT_SECONDS", 0.5)
    sidecar = {"port": sidecar_port}
    config = BalanceConfig(timeout_seconds=2.0, slot_memory="per_layer", sidecar=sidecar)
    asked = threading.Event()
    (board / "starting").touch()
    wait_for(board / "may-start")
    fork = multiprocessing.get_context("fork")
    batches = fork.RawArray("Q", NUM_RANKS)
    ranks = [
        fork.Process(target=_rank, args=(r, board, config, batches), daemon=True)
        for r in range(NUM_RANKS)
    ]
    for rank in ranks:
        rank.start()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    while not asked.wait(0.1):
        if not all(rank.is_alive() for rank in ranks):
            for rank in ranks:
                rank.kill()
            os._exit(1)
    (board / "stopping").touch()
    wait_for(board / "may-end")
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(3)
        rank.kill()


if __name__ == "__main__":
    main()
