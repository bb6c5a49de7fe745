"""How long plans are: instructions of a launch's longest warp."""

from contextlib import closing

import numpy as np
import torch
from ultraep_kernels.contract import FULL_SPEED, HEADER_WIDTH, POLICY, Policy, Prices
from ultraep_kernels.device.outcome import outcome_width
from ultraep_kernels.device.plan import Gate, Given, Planner, Rows, Sender, new_states, plan_sizes
from ultraep_kernels.device.status import new_status

from tests.emulated_gpu.kernels.compiled import Prepared, prepare
from tests.emulated_gpu.kernels.machine import Machine, Options
from tests.support.kernel_checks import no_ids
from tests.support.offline import recorded_launches


def executed(prepared: Prepared) -> int:
    """Instructions of the longest warp, where nothing is wrong."""
    machine = Machine(1, Options(seed=1, resident=200))
    with closing(machine):
        stores = {each.untyped_storage() for each in prepared.tensors}
        for start, size in {(store.data_ptr(), store.nbytes()) for store in stores}:
            if size:
                machine.add_memory(start, size, 0, machine.new_cells(size))
        machine.begin(prepared.grid)
        number = machine.launch(prepared, 0, [])
        machine.run()
        assert machine.findings() == []
        return machine.longest_warp(number)


def longest_warps(loads: np.ndarray, num_slots: int, *, keeps: bool) -> list[int]:
    """Instructions of the longest warp of two plans of the same ``loads`` (R, E)."""
    num_ranks, num_experts = loads.shape
    rows = torch.zeros((num_ranks, HEADER_WIDTH + num_experts), dtype=torch.int32)
    rows[:, HEADER_WIDTH:] = torch.from_numpy(loads)
    rows[:, POLICY] = Policy.QUOTA.code
    loads_of_rows, status = Rows.of(rows[:, HEADER_WIDTH:]), new_status("cpu")
    given = Given(loads_of_rows, status, Rows.of(rows), gate=Gate(1_020_000))
    planner = Planner(
        plan_sizes(num_ranks, num_experts, num_slots, keeps=keeps),
        given,
        Sender(0),
        prices=Prices(copy=1000 * FULL_SPEED),  # as computing 1000 assignments
    )
    sizes = num_experts, num_ranks, num_slots
    (state,) = new_states(1, *sizes, torch.device("cpu"))
    outcome = torch.zeros(outcome_width(*sizes), dtype=torch.int32)
    ids, count = no_ids(rows[:, HEADER_WIDTH:])
    found = []
    for _ in range(2):
        with recorded_launches() as launches:
            planner(ids, ids, count, outcome, state if keeps else None)
        found.append(executed(prepare(launches[0])))
    return found
