"""``PlanContext``: all that a plan depends on beside loads, the same on every rank.

A speed is a whole number from 1 to FULL_SPEED, which the fastest rank has; a time is a number of
assignments at FULL_SPEED. With equal speeds times are numbers of assignments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ultraep_kernels.contract import FULL_SPEED
from ultraep_kernels.host.speeds import full_speeds

from ultraep_serve.types import ExpertShape

Integers = NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class PlanContext:
    """Sizes, domains and speeds. Raises ValueError naming what is out of range.

    Whatever depends on where weights may go or on how fast ranks are takes it; what needs sizes
    alone (ids, memory, plans without copies) takes an ``ExpertShape``.
    """

    shape: ExpertShape
    domain_size: int  # D: copies stay within contiguous groups of this many ranks
    speeds: NDArray[np.int64]  # (R,), each 1 to FULL_SPEED; only their ratios matter

    def __post_init__(self) -> None:
        shape, speeds = self.shape, self.speeds
        if shape.num_masters * shape.num_ranks != shape.num_logical_experts:
            raise ValueError(f"{shape = }: num_logical_experts must be a multiple of num_ranks")
        if not 1 <= self.domain_size <= shape.num_ranks:
            raise ValueError(f"domain_size = {self.domain_size} must be 1 to {shape.num_ranks}")
        if speeds.shape != (shape.num_ranks,) or speeds.dtype != np.int64:
            raise ValueError(
                f"speeds is {speeds.dtype} {speeds.shape}, must be int64 {(shape.num_ranks,)}"
            )
        if speeds.min() < 1 or speeds.max() > FULL_SPEED:
            raise ValueError(f"speeds are {speeds.tolist()}, must each be 1 to {FULL_SPEED}")

    @classmethod
    def of(
        cls,
        shape: ExpertShape,
        domain_size: int | None = None,
        speeds: NDArray[np.int64] | None = None,
    ) -> "PlanContext":
        """All ranks are one domain, and equally fast, where nothing else is said."""
        size = shape.num_ranks if domain_size is None else domain_size
        return cls(shape, size, full_speeds(shape.num_ranks) if speeds is None else speeds)

    def rank_loads(self, loads: Integers) -> NDArray[np.int64]:
        """Assignments (R,) of ``loads`` (R, E) with every expert on its master."""
        total: NDArray[np.int64] = loads.sum(0, dtype=np.int64)
        by_rank: NDArray[np.int64] = total.reshape(self.shape.num_ranks, -1).sum(1)
        return by_rank

    # Imported not above: plug-ins that vLLM loads must not import numba, because vLLM's
    # ``register_kernels`` (0.32) takes attributes of llvmlite's for kernels.

    def busiest_time(self, rank_load: Integers) -> int:
        """The time of the busiest rank, rounded up, of ``rank_load`` (R,) assignments."""
        from ultraep_kernels.host.plan import busiest_time

        return int(busiest_time(rank_load.astype(np.int64), self.speeds))

    def least_time(self, rank_load: Integers) -> int:
        """The least time of the busiest rank, if any assignment could go anywhere in its domain.

        The largest over domains, of ``rank_load`` (R,) assignments.
        """
        from ultraep_kernels.host.plan import least_time

        return int(least_time(rank_load.astype(np.int64), self.speeds, self.domain_size))
