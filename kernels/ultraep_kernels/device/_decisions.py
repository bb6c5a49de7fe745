"""Decisions by number, as kernels know them, and the one that lets a batch's later layers rest."""

import triton
import triton.language as tl

from ultraep_kernels.contract import Decision

__all__ = ["BALANCED", "FORCED", "INCONSISTENT", "PLANNED", "POLICY_OFF", "UNPROFITABLE", "is_off"]

PLANNED, FORCED = tl.constexpr(int(Decision.PLANNED)), tl.constexpr(int(Decision.FORCED))
POLICY_OFF = tl.constexpr(int(Decision.POLICY_OFF))
BALANCED = tl.constexpr(int(Decision.BALANCED))
INCONSISTENT = tl.constexpr(int(Decision.INCONSISTENT))
UNPROFITABLE = tl.constexpr(int(Decision.UNPROFITABLE))


@triton.jit
def is_off(decision_ptr, begins):
    """Whether a batch, of which this layer is not the first, was found to have its policy off.

    The policy travels with the first layer's exchange and holds for the batch on every rank, so
    all of them leave the later layers' exchanges out. Without ``decision_ptr`` it never is.
    """
    off = begins < 0
    if decision_ptr is not None:
        off = (begins == 0) & (tl.load(decision_ptr) == POLICY_OFF)
    return off
