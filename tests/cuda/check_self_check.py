"""The self-check through the device's kernels: passes where all is well, refuses each fault.

Host memory stands in for the GPU's, as in ``check_balancer``. The ranks connect once and check
themselves once for every fault, which the last of them has.
"""

from dataclasses import replace
from pathlib import Path

import torch

from tests.support.balancer_rigs import search_briefly
from tests.support.host_driver import HostDriver
from tests.support.ranks import fresh_run_path, run_ranks
from tests.support.self_check_faults import FAULTS, FOUND, LAYERS, engine_of, experts
from ultraep_serve.balance.backend import GroupSetup
from ultraep_serve.balance.cuda.backend import DeviceBackend
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import SelfCheckError
from ultraep_serve.proof import start
from ultraep_serve.proof.device import stages_of
from ultraep_serve.proof.start import Stages
from ultraep_serve.system.topology import Location
from ultraep_serve.types import ExpertShape, TokenView

# One for each way of finding them; on host memory all are found.
FAULTS_HERE = (
    *("flipped bit", "never copied", "lost assignment", "wrong id", "quota off by one"),
    "wrong answer",
)


def check_less_for(fault: str, stages: Stages) -> Stages:
    """The interpreter is slow: checks find a fault where they look for it. In a process of its own.

    Without a fault there are small loads of every kind, and two layers.
    """
    start._TOKENS = 16
    if fault == "none":
        start._LOADS = 6
        return stages
    start._LOADS = int(FOUND[fault].startswith("kernels"))
    return replace(stages, layers=stages.layers[:1])


def outcomes(
    rank: int, run_path: Path, shape: ExpertShape, faults: list[str]
) -> list[tuple[list[str], str]]:
    """Names of the checks that were passed, and the error, for each of ``faults``."""
    search_briefly()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{run_path}/group", rank=rank, world_size=shape.num_ranks
    )
    config = BalanceConfig(run_dir=str(run_path), timeout_seconds=60.0)
    location = Location.on_one_host(rank, shape.num_ranks)
    setup = GroupSetup(config, shape, TokenView.SHARED, location, relay="always")
    backend = DeviceBackend(setup, HostDriver())
    slots = [backend.adopt(list(experts(rank, shape, layer))) for layer in range(LAYERS)]
    backend.connect()
    found = []
    for fault in faults:
        layers = [[torch.nn.Parameter(own, False) for own in each.tensors] for each in slots]
        stages = check_less_for(fault, stages_of(backend))
        answers = engine_of(rank, shape, layers)
        if rank == shape.num_ranks - 1:
            stages = FAULTS[fault](stages, shape, layers)
        try:
            passed = start.run_self_check(setup.context, stages, answers)
            found.append(([check.name for check in passed], ""))
        except SelfCheckError as error:
            found.append(([check.name for check in error.results[:-1]], str(error)))
    return found


def test_each_fault_is_refused_by_all_ranks() -> None:
    with fresh_run_path() as run_path:
        names, shape = ["none", *FAULTS_HERE], ExpertShape(3, 9, 2)
        ranks = run_ranks(outcomes, 3, run_path, shape, names, timeout_seconds=240)
    for fault, *of_ranks in zip(names, *ranks, strict=True):
        if fault == "none":
            assert of_ranks == [(["kernels", "copies"], "")] * 3
        else:
            assert all(error for _, error in of_ranks), fault
            assert any(FOUND[fault] in error for _, error in of_ranks), (fault, of_ranks)


def test_slots_of_every_micro_batch_are_filled_and_computed() -> None:
    with fresh_run_path() as run_path:
        shape = ExpertShape(2, 4, 2, num_micro_batches=2)
        ranks = run_ranks(outcomes, 2, run_path, shape, ["none"], timeout_seconds=240)
    assert ranks == [[(["kernels", "copies"], "")]] * 2
