"""reroute: topk_ids (T, K) logical + share -> topk_ids (T, K) physical, padding kept.

The j-th assignment of expert e takes place ``j * stride_e mod n_e`` in the list of its n_e places,
which lists the ranks of e one after another, each as often as its share says. A stride coprime
to n_e near n_e times the golden ratio uses every place exactly once and spreads neighbouring tokens
over the replicas, so no rank is hit by a burst (Weyl's equidistribution; Knuth, TAOCP 3, 6.4).
Twin: ``device.reroute``.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_kernels.contract import GOLDEN_DENOMINATOR, GOLDEN_NUMERATOR
from ultraep_kernels.host._compile import compiled


@compiled
def _stride(places: int) -> int:
    stride = max(1, places * GOLDEN_NUMERATOR // GOLDEN_DENOMINATOR)
    while True:
        a, b = stride, places
        while b:
            a, b = b, a % b
        if a == 1:
            return stride
        stride += 1


@compiled
def _reroute_kernel(topk_ids: Any, share: Any, physical: Any, out: Any) -> bool:
    num_experts, num_ranks = share.shape
    places = np.zeros(num_experts, dtype=np.int64)
    only = np.full(num_experts, -1, dtype=np.int64)
    stride = np.ones(num_experts, dtype=np.int64)
    seen = np.zeros(num_experts, dtype=np.int64)
    for expert in range(num_experts):
        num_targets = 0
        for rank in range(num_ranks):
            if share[expert, rank] > 0:
                places[expert] += share[expert, rank]
                only[expert] = rank
                num_targets += 1
        if num_targets > 1:
            only[expert] = -1
            stride[expert] = _stride(places[expert])
    for i in range(topk_ids.size):
        expert = topk_ids[i]
        if expert < 0 or expert >= num_experts:
            out[i] = -1
            continue
        if seen[expert] >= places[expert]:
            return False
        rank = only[expert]
        if rank < 0:
            place = seen[expert] * stride[expert] % places[expert]
            rank = 0
            while place >= share[expert, rank]:
                place -= share[expert, rank]
                rank += 1
        seen[expert] += 1
        out[i] = physical[expert, rank]
    return True


@compiled
def physical_table(slot_expert: NDArray[np.int32], num_masters: int) -> NDArray[np.int32]:
    """Physical id of each expert on each rank, (E, R) int32, -1 where it has no copy.

    ``slot_expert`` (R, S) logical expert in each replica slot, -1 empty.
    """
    num_ranks, num_slots = slot_expert.shape
    width = num_masters + num_slots
    table = np.full((num_ranks * num_masters, num_ranks), -1, np.int32)
    for expert in range(table.shape[0]):
        owner = expert // num_masters
        table[expert, owner] = owner * width + expert % num_masters
    for rank in range(num_ranks):
        for slot in range(num_slots):
            if slot_expert[rank, slot] >= 0:
                table[slot_expert[rank, slot], rank] = rank * width + num_masters + slot
    return table


def reroute(
    topk_ids: torch.Tensor,
    share: NDArray[np.int32],
    slot_expert: NDArray[np.int32],
    num_masters: int,
) -> torch.Tensor:
    """Physical ids (T, K) int32, the same on every rank that sees the same tokens.

    ``topk_ids`` (T, K) logical on CPU, what is no expert becomes -1; ``share`` (E, R) assignments
    of this source by target rank; ``slot_expert`` (R, S). Raises ValueError when ids and share do
    not belong together.
    """
    physical = physical_table(slot_expert, num_masters)
    out = torch.empty(topk_ids.shape, dtype=torch.int32)
    flat = topk_ids.reshape(-1).numpy()
    if not _reroute_kernel(flat, share, physical, out.view(-1).numpy()):
        raise ValueError("share holds fewer assignments than topk_ids")
    return out
