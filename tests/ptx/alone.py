"""One rank's plan by itself: a launch that follows nothing, executed for loads that are given."""

from dataclasses import dataclass

import torch
from ultraep_kernels.device.plan import DevicePlan, PlanSizes, new_plan_buffers, plan
from ultraep_kernels.device.status import new_status

from tests.ptx.compiled import prepare
from tests.ptx.machine import Finding, Machine, Options
from tests.support.offline import Launch, recorded_launches

__all__ = ["Planned", "plan_alone"]


@dataclass(frozen=True)
class Planned:
    """What came of it."""

    found: DevicePlan
    sizes: PlanSizes
    launch: Launch
    findings: list[Finding]
    steps: list[int]  # instructions that each program executed


def plan_alone(loads: torch.Tensor, num_slots: int, options: Options, source: int = 0) -> Planned:
    """For ``loads`` (R, E) int32. Raises MachineError."""
    buffers = new_plan_buffers(*loads.shape, num_slots, "cpu")
    with recorded_launches() as launches:
        found = plan(loads, num_slots, source, new_status("cpu"), buffers=buffers)
    prepared, machine = prepare(launches[0]), Machine(1, options)
    try:
        for start, size in {(each.data_ptr(), each.nbytes) for each in prepared.tensors}:
            if size:
                machine.add_memory(start, size, 0, machine.new_cells(size))
        machine.begin(prepared.grid)
        number = machine.launch(prepared, 0, [])
        machine.run()
        steps = machine.steps_of_programs(number, prepared.grid)
        return Planned(found, buffers.sizes, launches[0], machine.findings(), steps)
    finally:
        machine.close()
