"""row: load (E,) -> what a rank tells the others of a layer, one row of int32.

A header of ``HEADER_WIDTH`` and, where ranks have tokens of their own, the load behind it. Rank 0's
policy and threshold count, everybody's unknown ids and checksums do. One launch of one program.
"""

import torch
import triton
import triton.language as tl

__all__ = ["CHECKSUM", "HEADER_WIDTH", "POLICY", "THRESHOLD", "UNKNOWN", "row_reference"]
__all__ += ["write_row"]

HEADER_WIDTH = 8  # the rest is reserved and 0
POLICY = 0  # code of an ultraep_serve.types.Policy
UNKNOWN = 1  # ids that were neither an expert nor padding
CHECKSUM = 2  # of the load where ranks share their tokens, else 0
THRESHOLD = 3  # imbalance in millionths; less than a million: as configured

_HEADER_WIDTH = tl.constexpr(HEADER_WIDTH)
_POLICY, _UNKNOWN = tl.constexpr(POLICY), tl.constexpr(UNKNOWN)
_CHECKSUM, _THRESHOLD = tl.constexpr(CHECKSUM), tl.constexpr(THRESHOLD)


@triton.jit
def _row_kernel(
    load_ptr,  # (E,) int32
    unknown_ptr,  # (1,) int32
    choice_ptr,  # (2,) int32: policy, threshold
    row_ptr,  # (W,) int32, out
    NUM_EXPERTS: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    experts = tl.arange(0, BLOCK)
    mask = experts < NUM_EXPERTS
    load = tl.load(load_ptr + experts, mask=mask, other=0)
    checksum = tl.sum(load, axis=0) * 0
    if HAS_LOAD:
        tl.store(row_ptr + _HEADER_WIDTH + experts, load, mask=mask)
    else:
        bits = load.to(tl.uint32) * 0x9E3779B1 + experts.to(tl.uint32) * 0x85EBCA77
        bits = (bits ^ (bits >> 15)) * 0x2C1B3C6D
        bits = tl.where(mask, bits ^ (bits >> 13), 0)
        checksum = tl.xor_sum(bits.to(tl.int32), axis=0)
    columns = tl.arange(0, _HEADER_WIDTH)
    header = tl.where(columns == _POLICY, tl.load(choice_ptr), 0)
    header = tl.where(columns == _UNKNOWN, tl.load(unknown_ptr), header)
    header = tl.where(columns == _CHECKSUM, checksum, header)
    header = tl.where(columns == _THRESHOLD, tl.load(choice_ptr + 1), header)
    tl.store(row_ptr + columns, header)


def write_row(
    load: torch.Tensor, unknown: torch.Tensor, choice: torch.Tensor, has_load: bool
) -> torch.Tensor:
    """This rank's row (W,) int32, W = HEADER_WIDTH, and E more where it has its load.

    Args:
        load: (E,) int32.
        unknown: (1,) int32, ids that could not be counted.
        choice: (2,) int32, policy and threshold as this rank would have them.
        has_load: whether the load follows the header; else the header has its checksum.
    """
    num_experts = load.numel()
    width = HEADER_WIDTH + (num_experts if has_load else 0)
    row = torch.empty(width, dtype=torch.int32, device=load.device)
    _row_kernel[(1,)](
        load,
        unknown,
        choice,
        row,
        NUM_EXPERTS=num_experts,
        HAS_LOAD=has_load,
        BLOCK=max(32, triton.next_power_of_2(num_experts)),
        num_warps=4,
    )
    return row


def row_reference(
    load: torch.Tensor, unknown: torch.Tensor, choice: torch.Tensor, has_load: bool
) -> torch.Tensor:
    """Torch twin of ``write_row``."""
    whole = (1 << 32) - 1
    checksum = 0
    for expert, count in enumerate(load.tolist()):
        bits = (count * 0x9E3779B1 + expert * 0x85EBCA77) & whole
        bits = (bits ^ bits >> 15) * 0x2C1B3C6D & whole
        checksum ^= bits ^ bits >> 13
    header = torch.zeros(HEADER_WIDTH, dtype=torch.int64, device=load.device)
    header[POLICY], header[THRESHOLD] = choice[0], choice[1]
    header[UNKNOWN], header[CHECKSUM] = unknown[0], 0 if has_load else checksum
    header = header.where(header < 1 << 31, header - (1 << 32)).int()
    return torch.cat([header, load]) if has_load else header
