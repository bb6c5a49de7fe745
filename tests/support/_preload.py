"""Imported by the process that ranks are forked from: loads compiled code once for all of them."""

import numpy as np
import torch
from ultraep_kernels.host.count import count
from ultraep_kernels.host.relays import relay_parents
from ultraep_kernels.host.reroute import reroute

from tests.support import stress  # noqa: F401 - with its ranks' code
from ultraep_serve.plan.context import PlanContext
from ultraep_serve.plan.quota import plan_quota
from ultraep_serve.types import ExpertShape

_SHAPE = ExpertShape(2, 2, 1)


def _warm_up() -> None:
    ids = torch.zeros((4, 1), dtype=torch.int32)
    load, _ = count(ids, _SHAPE.num_logical_experts)
    plan = plan_quota(np.stack([load, load]), PlanContext.of(_SHAPE), 0)
    relay_parents(plan.slot_expert, _SHAPE.num_masters, "always")
    reroute(ids, plan.share, plan.slot_expert, _SHAPE.num_masters)


_warm_up()
