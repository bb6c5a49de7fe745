"""speeds: all ranks' rows of a batch's first layer -> speeds (R,) that its layers are planned with.

One launch of one program. What ranks measured is followed whether it is used or not. Twin:
``host.speeds``.
"""

import torch
import triton
import triton.language as tl

from ultraep_kernels.contract import FULL_SPEED, SPEED_LIMITS, SPEEDS, TIME, SpeedSource
from ultraep_kernels.device.launch import launch

__all__ = ["choose_speeds"]

_TIME, _SPEEDS = tl.constexpr(TIME), tl.constexpr(SPEEDS)
_FULL = tl.constexpr(FULL_SPEED)
_LEAVE_FULL = tl.constexpr(SPEED_LIMITS.leave_full)
_BAND, _NEAR_FULL = tl.constexpr(SPEED_LIMITS.band), tl.constexpr(SPEED_LIMITS.near_full)
_STEP, _GRAIN = tl.constexpr(SPEED_LIMITS.step), tl.constexpr(SPEED_LIMITS.grain)
_LEAST = tl.constexpr(SPEED_LIMITS.least)
_EQUAL, _AUTO = tl.constexpr(SpeedSource.EQUAL.code), tl.constexpr(SpeedSource.AUTO.code)


@triton.jit
def _choose_kernel(
    rows_ptr,  # (R, stride) int32
    stride,
    configured_ptr,  # (R,) int32; not read without HAS_CONFIGURED
    agreed_ptr,  # (R,) int32, in and out
    used_ptr,  # (R,) int32, out
    NUM_RANKS: tl.constexpr,
    HAS_CONFIGURED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ranks = tl.arange(0, BLOCK)
    mask = ranks < NUM_RANKS
    took = tl.load(rows_ptr + ranks * stride + _TIME, mask=mask, other=0x7FFFFFFF).to(tl.int64)
    speeds = tl.load(agreed_ptr + ranks, mask=mask, other=1).to(tl.int64)
    fastest = tl.min(took, axis=0)
    found = fastest * _FULL // tl.maximum(took, 1)
    stepped = tl.minimum(tl.maximum(found, speeds - _STEP), speeds + _STEP)
    changed = tl.maximum((stepped + _GRAIN // 2) // _GRAIN * _GRAIN, _LEAST)
    clear = tl.where(speeds == _FULL, _LEAVE_FULL, speeds // _BAND)
    kept = tl.where(tl.abs(found - speeds) > clear, changed, speeds)
    values = tl.where(tl.minimum(found, stepped) >= _FULL - _NEAR_FULL, _FULL, kept)
    largest = tl.max(tl.where(mask, values, 1), axis=0)
    values = tl.where(fastest > 0, values * _FULL // largest, speeds).to(tl.int32)
    tl.debug_barrier()  # threads beyond the ranks have read what is overwritten too
    tl.store(agreed_ptr + ranks, values, mask=mask)
    source = tl.load(rows_ptr + _SPEEDS)
    used = values
    if HAS_CONFIGURED:
        configured = tl.load(configured_ptr + ranks, mask=mask, other=1)
        used = tl.where(source == _AUTO, values, configured)
    used = tl.where(source == _EQUAL, _FULL, used)
    tl.store(used_ptr + ranks, used, mask=mask)


def choose_speeds(
    rows: torch.Tensor, configured: torch.Tensor | None, agreed: torch.Tensor, used: torch.Tensor
) -> None:
    """Bring ``agreed`` and ``used`` up to date.

    Args:
        rows: (R, W) int32, all ranks' rows; rank 0's says where speeds come from.
        configured: (R,) int32, speeds that the setting fixes; None for "auto".
        agreed: (R,) int32, those that follow what ranks measure, FULL_SPEED at first.
        used: (R,) int32, those to plan with.
    """
    num_ranks = rows.shape[0]
    launch(
        _choose_kernel,
        (1,),
        rows,
        rows.stride(0),
        agreed if configured is None else configured,
        agreed,
        used,
        NUM_RANKS=num_ranks,
        HAS_CONFIGURED=configured is not None,
        BLOCK=triton.next_power_of_2(num_ranks),
        num_warps=1,
    )
