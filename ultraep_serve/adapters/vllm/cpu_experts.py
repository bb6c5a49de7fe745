"""Expert parallelism on CPU, which vLLM's own CPU kernel does not survive.

vLLM's kernel ignores the expert map and reads out of bounds for experts of other ranks. It computes
local experts correctly from one row per assignment, so that is what it gets here: rows are gathered
(tensor parallel: every rank has all tokens) or sent to the rank that computes them (data parallel),
and added back per token, weighted.

Sums are taken in float32 until they are complete, across ranks too. Weighted outputs in bfloat16
have 8 significant bits, so their float32 sum is exact unless they differ in size by more than
2**13: a token's result does not depend on which rank computed which expert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.adapters.vllm.checks import check_cpu_execution
from ultraep_serve.adapters.vllm.expert_tensors import (
    expert_parameters,
    fit_shared_values,
    require_shared_values_agree,
)
from ultraep_serve.physical import identity_table
from ultraep_serve.speeds import expert_clock
from ultraep_serve.types import ExpertShape

__all__ = [
    "Assignments",
    "CpuExperts",
    "compute_and_reduce",
    "dispatch_compute_combine",
    "run_experts",
    "take_over_combine",
]


@dataclass(frozen=True)
class Assignments:
    """Where each (token, k) pair is computed."""

    rank: torch.Tensor  # (T, K) int64 target rank, -1 padding
    local: torch.Tensor  # (T, K) int32 expert on that rank

    @classmethod
    def from_physical(cls, physical: torch.Tensor, num_local: int) -> "Assignments":
        """From physical ids (T, K) = rank * num_local + local, -1 padding."""
        rank = torch.div(physical, num_local, rounding_mode="floor").long()
        return cls(rank=rank, local=(physical - rank * num_local).int())


class CpuExperts:
    """What ``ExpertGroup`` asks of the engine on CPU: dispatch, experts and combine are ours."""

    num_micro_batches = 1

    def __init__(self) -> None:
        self._num_local = 0  # physical experts per rank
        self._identity: torch.Tensor | None = None  # of a group that is not balanced

    def check(self, layer: RoutedExperts) -> None:
        """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced here."""
        check_cpu_execution(layer)

    def give_slots(self, layers: Sequence[RoutedExperts], shape: ExpertShape) -> None:
        """Ids are physical from now on.

        Raises UnsupportedError, on all ranks alike, if a copied expert may compute something else
        than its master.
        """
        require_shared_values_agree(layers)
        for layer in layers:
            own = expert_parameters(layer)
            fit_shared_values(layer, own, shape.num_masters, shape.num_local)
        self._num_local = shape.num_local

    def take_slots_back(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Undo ``give_slots``; rows behind the masters do no harm."""
        self._num_local = 0

    def finish(self, layers: Sequence[RoutedExperts]) -> None:
        """Put our dispatch and combine in place, with slots or without.

        Raises UnsupportedError for a layer that they cannot run.
        """
        parallel = layers[0].moe_config.moe_parallel_config
        if parallel.use_ep:
            for layer in layers:
                check_cpu_execution(layer)
                take_over_combine(layer)
        if not self._num_local:
            num_experts, num_ranks = layers[0].global_num_experts, parallel.ep_size
            self._num_local = -(-num_experts // num_ranks)
            self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Physical ids (T, K) of masters where there are no slots; padding -1 kept."""
        assert self._identity is not None, "balanced"
        return self._identity[topk_ids.long()]

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """Complete output (T, H) for this rank's tokens ``x`` (T, H)."""
        assignments = Assignments.from_physical(physical, self._num_local)
        group = get_ep_group()
        if layer.moe_config.dp_size > 1:
            return dispatch_compute_combine(layer, x, topk_weights, assignments, group.cpu_group)
        return compute_and_reduce(layer, x, topk_weights, assignments, group)


def take_over_combine(layer: RoutedExperts) -> None:
    """Tell vLLM that ``layer``'s output comes complete, so that it does not reduce it again.

    Uses the stage vLLM has for experts that dispatch and combine themselves.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), experts)


def compute_and_reduce(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: GroupCoordinator,
) -> torch.Tensor:
    """Complete output (T, H) where every rank of ``group`` has all tokens ``x`` (T, H).

    ``topk_weights`` (T, K).
    """
    rows = torch.nonzero(assignments.rank.view(-1) == group.rank_in_group).squeeze(1)
    tokens = torch.div(rows, topk_weights.shape[1], rounding_mode="floor")
    weights = topk_weights.reshape(-1)[rows]
    outputs = run_experts(layer, x[tokens], weights, assignments.local.view(-1)[rows])
    total: torch.Tensor = group.all_reduce(_add_up(outputs, tokens, x))
    return total.to(x.dtype)


def dispatch_compute_combine(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Complete output (T, H) for this rank's own tokens ``x`` (T, H), through all-to-all.

    Every assignment comes home as a row of its own.
    """
    num_ranks = dist.get_world_size(group)
    target = assignments.rank.view(-1)
    order = torch.argsort(target, stable=True)
    order = order[int((target < 0).sum()) :]
    tokens = torch.div(order, topk_weights.shape[1], rounding_mode="floor")
    send = torch.bincount(target[order], minlength=num_ranks)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    away, here = send.tolist(), receive.tolist()
    rows = _all_to_all(x[tokens], away, here, group)
    local = _all_to_all(assignments.local.view(-1)[order], away, here, group)
    weights = _all_to_all(topk_weights.reshape(-1)[order], away, here, group)
    outputs = run_experts(layer, rows, weights, local)
    home = _all_to_all(outputs, here, away, group)
    by_token = torch.argsort(order)
    return _add_up(home[by_token], tokens[by_token], x).to(x.dtype)


@expert_clock
def run_experts(
    layer: RoutedExperts, rows: torch.Tensor, weights: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """Weighted expert outputs (N, H) for ``rows`` (N, H), one expert of this rank each."""
    outputs = torch.empty_like(rows)
    if not rows.shape[0]:
        return outputs
    weights = weights.unsqueeze(1).float()
    on_input = layer.apply_router_weight_on_input
    if on_input:
        rows = rows * weights.to(rows.dtype)
    empty = rows.new_empty(0)
    layer.quant_method.moe_kernel.fused_experts.apply(
        output=outputs,
        hidden_states=rows,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=local.unsqueeze(1),
        activation=layer.activation,
        global_num_experts=layer.w13_weight.shape[0],
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=empty,
        workspace2=empty,
        expert_tokens_meta=None,
        apply_router_weight_on_input=on_input,
    )
    return outputs


def _add_up(outputs: torch.Tensor, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32)
    return total.index_add_(0, tokens, outputs.float())


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchange rows (N, ...) between ranks, in rank order; bytes, whatever the dtype."""
    width = math.prod(rows.shape[1:]) * rows.element_size()
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(
        out.view(-1).view(torch.uint8),
        rows.contiguous().view(-1).view(torch.uint8),
        [count * width for count in receive],
        [count * width for count in send],
        group=group,
    )
    return out
