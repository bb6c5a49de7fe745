"""Decisions by number, as kernels know them."""

import triton.language as tl

from ultraep_kernels.contract import Decision

PLANNED, FORCED = tl.constexpr(int(Decision.PLANNED)), tl.constexpr(int(Decision.FORCED))
POLICY_OFF = tl.constexpr(int(Decision.POLICY_OFF))
BALANCED = tl.constexpr(int(Decision.BALANCED))
INCONSISTENT = tl.constexpr(int(Decision.INCONSISTENT))
UNPROFITABLE = tl.constexpr(int(Decision.UNPROFITABLE))
