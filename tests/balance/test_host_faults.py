"""Ranks of one or two hosts, balanced without an engine: what one suffers, and how others end."""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from queue import Queue

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.hosts import engine_group, host_path, meet_in
from tests.support.namespaces import Hosts, enter_network, two_namespaces
from tests.support.ranks import RankOutcome, fresh_run_path, outcomes_of_ranks
from ultraep_serve.balance.collectives import DeviceAllGather
from ultraep_serve.balance.host import balancer
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import CostModel
from ultraep_serve.engines.common.group import BalancedLayers
from ultraep_serve.engines.common.loaded import EngineRank, MovableLayers
from ultraep_serve.system.topology import Location
from ultraep_serve.telemetry.recorder import Stopwatch
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape, Stage, TokenView

TIMEOUT = 2.0
PORT = 29_500  # of the engine's store, in a network of its own
SLACK = 25.0  # beyond the timeout, by when all must have ended, also who was stopped
STRUCK = 3  # the batch of the fault
LAST = 6  # the batch behind which all ranks are asked to stop
GIVEN = CostModel(1e-3, bytes_per_expert=1 << 10, link_bytes_per_second=1e9)


@dataclass(frozen=True)
class Fault:
    """What befalls the last rank, and when."""

    name: str  # of a signal; "pause", of less than the timeout; or "cut", the link between hosts
    when: Stage | str  # the stage that has just ended; or "load", "stop"

    def strike(self, run_path: Path, hosts: Hosts | None) -> None:
        (run_path / "struck").touch()
        if self.name == "cut":
            assert hosts is not None
            hosts.cut()
            return
        if self.name in ("SIGSTOP", "pause"):
            seconds = TIMEOUT * (8 if self.name == "SIGSTOP" else 0.25)
            # Not a fork: the child of a process with threads may wait for ever for one's lock.
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.Signals["SIGSTOP" if self.name == "pause" else self.name])


@dataclass(frozen=True)
class Ended:
    """How a group ended."""

    outcomes: list[RankOutcome]  # the victim's is the last
    lost_reasons: list[str]  # what is said on the host of each rank
    seconds: float  # from the fault to the last rank's end


class _Struck(Stopwatch):
    """Calls ``strike`` at the end of a stage, in the batch of the fault."""

    batch = 0
    stage: Stage
    strike: Callable[[], None]

    def lap(self, stage: Stage) -> None:
        super().lap(stage)
        if stage is self.stage and self.batch == STRUCK:
            type(self).batch = -1
            type(self).strike()


def serve(rank: int, run_path: Path, hosts: Hosts | None, size: int, fault: Fault) -> str:
    """Batches until a rank is lost, or all are asked to stop; ``size`` ranks to a host."""
    num_ranks = size if hosts is None else 2 * size
    is_victim = rank == num_ranks - 1
    location = Location(rank, num_ranks, size, size)
    if hosts is not None:
        enter_network(hosts.names[rank // size])
        os.environ["GLOO_SOCKET_IFNAME"] = hosts.link
    group = engine_group(run_path, rank, num_ranks)
    if hosts is not None:
        store = TCPStore(hosts.addresses[0], PORT, is_master=rank == 0, wait_for_workers=False)
        group = replace(group, store=store)
    home = host_path(run_path, location)
    meet_in(home)

    def strike() -> None:
        fault.strike(run_path, hosts)

    def run_layer(assignments: int) -> None:
        if is_victim and fault.when == "load" and not (run_path / "struck").exists():
            strike()
        time.sleep(assignments * 1e-6)

    costs = "" if fault.when == "load" else GIVEN.to_json()
    config = BalanceConfig(min_batch_tokens=8, timeout_seconds=TIMEOUT, costs=costs)
    shape = ExpertShape(num_ranks, 2 * num_ranks, 1)
    layer = [torch.nn.Parameter(torch.full((2, 300), 1.0 + rank), False)]
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in {
            "telemetry.recorder.HEARTBEAT_SECONDS": 0.5,
            "balance.backend.CONNECT_FACTOR": 5 if fault.when == "load" else 20,
            "balance.watch.HEARTBEAT_SECONDS": 0.5,
            "balance.watch._LONGEST_STEP": 1.0,
            "balance.watch._QUIET_SECONDS": 2.0,
            "balance.watch._GRACE_SECONDS": 1.0,
        }.items():
            patch.setattr(f"ultraep_serve.{name}", seconds)
        if is_victim and fault.when != "load":
            _Struck.stage = fault.when if isinstance(fault.when, Stage) else Stage.EXCHANGE
            _Struck.strike = staticmethod(strike)
            patch.setattr(balancer, "Stopwatch", _Struck)
        layers = MovableLayers([layer], shape, TokenView.SHARED, run_layer)
        joined = BalancedLayers(config, EngineRank("test", rank, group), layers)
        joined.end_loading(logging.getLogger(__name__))
        ids = torch.tensor([[0, 2 * (num_ranks - size)]], dtype=torch.int32).repeat(64, 1)
        for batch in count():
            if batch == LAST and (fault.when == "stop" or fault.name == "pause"):
                if is_victim and fault.when == "stop":
                    strike()
                return "stopped"
            _Struck.batch = -1 if fault.when == "stop" else batch
            joined.balancer.route(0, ids, 64)
            joined.balancer.receive()
            joined.balancer.computed()
    return ""


def suffer(fault: Fault, hosts: Hosts | None) -> Ended:
    """Two ranks: of two hosts, or of one where there are no ``hosts``."""
    size = 2 if hosts is None else 1
    with fresh_run_path() as run_path:
        given = run_path, hosts, size, fault
        outcomes = outcomes_of_ranks(serve, 2, *given, timeout_seconds=180.0)  # start included
        seconds = time.time() - (run_path / "struck").stat().st_mtime
        homes = [RunFiles(run_path / f"host-{rank // size * size}") for rank in range(2)]
        return Ended(outcomes, [home.lost_reason() for home in homes], seconds)


SIGNALS = ["SIGKILL", "SIGSEGV", "SIGSTOP"]
WHENS = ["load", Stage.COUNT, Stage.REROUTE, Stage.WAIT]
ON_ONE_HOST = [
    *(Fault(name, "load") for name in SIGNALS),
    *(Fault("SIGSEGV", stage) for stage in Stage),
    Fault("SIGSTOP", Stage.WAIT),
]
PAUSE = Fault("pause", Stage.WAIT)
AT_ONCE = 4  # groups, which mostly wait


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[Fault, bool], Ended]]:
    """How ranks ended after each fault, on two hosts or on one; all are tried, a few at once."""
    apart = [Fault(name, when) for when in [*WHENS, "stop"] for name in [*SIGNALS, "cut"]]
    with ExitStack() as stack:
        pairs: Queue[Hosts] = Queue()
        for _ in range(AT_ONCE):
            pairs.put(stack.enter_context(two_namespaces()))

        def suffer_apart(fault: Fault) -> Ended:
            hosts = pairs.get()
            hosts.join()
            try:
                return suffer(fault, hosts)
            finally:
                pairs.put(hosts)

        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        found = {(fault, True): pool.submit(suffer_apart, fault) for fault in apart}
        for fault in (*ON_ONE_HOST, PAUSE):
            found[fault, False] = pool.submit(suffer, fault, None)
        yield lambda fault, two_hosts: found[fault, two_hosts].result()


def others(fault: Fault, ended: Ended) -> list[RankOutcome]:
    """How those ended that are no victim of a deadly signal, all in the time that they have."""
    assert ended.seconds < TIMEOUT + SLACK
    assert not any(outcome.timed_out for outcome in ended.outcomes), ended
    if fault.name in ("SIGKILL", "SIGSEGV"):
        assert ended.outcomes[-1].signal == signal.Signals[fault.name]
        return ended.outcomes[:-1]
    return ended.outcomes


def check_ended(fault: Fault, ended: Ended) -> None:
    """By an error that says who is missing; nobody has answered since."""
    for rank, outcome in enumerate(others(fault, ended)):
        assert outcome.error in ("PeerTimeoutError", "SystemExit"), outcome
        said = outcome.message or ended.lost_reasons[rank]
        assert "restart the engine" in said, (rank, outcome)


@pytest.mark.parametrize("name", [*SIGNALS, "cut"])
@pytest.mark.parametrize("when", WHENS, ids=lambda when: getattr(when, "name", when))
def test_another_hosts_fault_ends_this_one(
    ended: Callable[[Fault, bool], Ended], when: Stage | str, name: str
) -> None:
    fault = Fault(name, when)
    check_ended(fault, ended(fault, True))


@pytest.mark.parametrize("fault", ON_ONE_HOST, ids=str)
def test_a_rank_that_is_lost_in_any_stage_ends_the_others(
    ended: Callable[[Fault, bool], Ended], fault: Fault
) -> None:
    check_ended(fault, ended(fault, False))


def test_a_rank_that_stops_for_less_is_waited_for(ended: Callable[[Fault, bool], Ended]) -> None:
    assert [outcome.value for outcome in ended(PAUSE, False).outcomes] == ["stopped"] * 2


@pytest.mark.parametrize("name", [*SIGNALS, "cut"])
def test_another_hosts_fault_does_not_keep_this_one_from_stopping(
    ended: Callable[[Fault, bool], Ended], name: str
) -> None:
    fault = Fault(name, "stop")
    assert others(fault, ended(fault, True))[0].value == "stopped"


def lose_on_device(rank: int, run_path: Path) -> None:
    all_gather = DeviceAllGather(engine_group(run_path, rank, 2).on_device)
    for _ in range(2):
        all_gather.gather(torch.zeros(3, dtype=torch.int32), torch.zeros((2, 3), dtype=torch.int32))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_devices_group_that_reports_a_lost_rank_is_a_typed_error(run_path: Path) -> None:
    outcomes = outcomes_of_ranks(lose_on_device, 2, run_path, timeout_seconds=30.0)
    assert outcomes[0].error == "PeerTimeoutError", outcomes[0]
