"""Expert parallelism on CPU, which vLLM's own CPU kernel does not survive.

vLLM's kernel ignores the expert map and reads out of bounds for experts of other ranks. It computes
local experts correctly from one row per assignment, so that is what it gets here: rows are gathered
(tensor parallel: every rank has all tokens) or sent to the rank that computes them (data parallel),
and added back per token, weighted.

vLLM's portable kernel for unquantised experts widens bfloat16 to float32 before it multiplies.
Where the CPU multiplies bfloat16 itself and experts have enough rows, they are computed as products
of oneDNN's instead, in about half the time. Which of the two is decided by the tokens of all ranks,
so that it does not depend on the rank that computes a token, where all hosts have the same CPU.

Sums are taken in float32 until they are complete, across ranks too. Weighted outputs in bfloat16
have 8 significant bits, so their float32 sum is exact unless they differ in size by more than
2**13: a token's result does not depend on which rank computed which expert.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import get_ep_group, get_tp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.engines.common.cpu_experts import (
    Expert,
    add_up,
    has_fast_products,
    rows_by_expert,
    weighted_outputs,
)
from ultraep_serve.engines.common.execution import Execution
from ultraep_serve.engines.vllm.checks import check_cpu_execution, has_amx
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values

__all__ = [
    "Assignments",
    "CpuExperts",
    "compute_and_reduce",
    "dispatch_compute_combine",
    "take_over_combine",
]

_LEAST_ROWS = 64  # of an expert on average, from which products of oneDNN's are faster
_ACTIVATIONS: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {  # of the gate
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}
_COLUMNS = 16  # that lie beside each other in a packed matrix


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


class CpuExperts(Execution[RoutedExperts]):
    """``Execution`` on CPU, where the adapter dispatches, computes experts and combines."""

    num_micro_batches = 1

    def __init__(self) -> None:
        """Ask the operating system for AMX, where the CPU has it.

        A process that has not asked is ended when a kernel uses AMX. vLLM's kernels for experts
        leave that to layers that run before them, but costs are measured before those run.
        """
        if has_amx():
            torch.cpu._init_amx()
        self._num_local = 0  # physical experts per rank
        self._identity: torch.Tensor | None = None  # physical ids (E,) where there are no slots

    def check(self, layer: RoutedExperts) -> None:
        check_cpu_execution(layer)

    def resize(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        for layer, own in zip(layers, parameters, strict=True):
            fit_shared_values(layer, own, before, after)
        self._num_local = after

    def finish(self, layers: Sequence[RoutedExperts]) -> None:
        """Put our dispatch and combine in place, with slots or without.

        Raises UnsupportedError for a layer that they cannot run.
        """
        parallel = layers[0].moe_config.moe_parallel_config
        if parallel.use_ep:
            for layer in layers:
                check_cpu_execution(layer)
                take_over_combine(layer)
        num_experts, num_ranks = layers[0].global_num_experts, parallel.ep_size
        self._num_local = self._num_local or -(-num_experts // num_ranks)
        self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Physical ids (T, K) of masters where there are no slots; padding -1 kept."""
        assert self._identity is not None, "layers are finished first"
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
    own = torch.where(assignments.rank == group.rank_in_group, assignments.local, -1)
    parts = _outputs(layer, x, topk_weights, own, num_tokens=x.shape[0])
    with expert_clock:
        own_total = add_up(parts, x.shape)
    total: torch.Tensor = _group_to_reduce(group).all_reduce(own_total)
    return total.to(x.dtype)


def _group_to_reduce(ranks: GroupCoordinator) -> GroupCoordinator:
    """The tensor-parallel group if it has the same ranks: vLLM reduces in shared memory there."""
    same: GroupCoordinator = get_tp_group()
    return same if same.ranks == ranks.ranks else ranks


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
    told = torch.stack([send, torch.full_like(send, x.shape[0])], dim=1)  # to each rank
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told, group=group)
    away, here = send.tolist(), heard[:, 0].tolist()
    rows = _all_to_all(x[tokens], away, here, group)
    local = _all_to_all(assignments.local.view(-1)[order], away, here, group)
    weights = _all_to_all(topk_weights.reshape(-1)[order], away, here, group)
    outputs = torch.empty_like(rows)
    num_tokens = int(heard[:, 1].sum())
    with expert_clock:
        for places, part in _outputs(layer, rows, weights[:, None], local[:, None], num_tokens):
            outputs[places] = part
    home = _all_to_all(outputs, here, away, group)
    by_token = torch.argsort(order)
    return add_up(iter([(tokens[by_token], home[by_token])]), x.shape).to(x.dtype)


def _outputs(
    layer: RoutedExperts,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    local: torch.Tensor,
    num_tokens: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens (n,) and what this rank's experts give for them, times their weights, (n, H) as ``x``.

    ``x`` (T, H), ``topk_weights`` (T, K), ``local`` (T, K) expert of this rank, -1 for another
    rank's; ``num_tokens`` of all ranks.
    """
    num_experts = layer.w13_weight.shape[0]
    rows_per_expert = num_tokens * layer.top_k // layer.moe_config.num_experts
    if rows_per_expert >= _LEAST_ROWS and _has_products(layer):
        expert = functools.partial(_expert, layer)
        yield from weighted_outputs(expert, num_experts, x, topk_weights, local)
        return
    places, _ = rows_by_expert(local, num_experts)
    tokens = torch.div(places, local.shape[1], rounding_mode="floor")
    weights, experts = topk_weights.reshape(-1)[places], local.reshape(-1)[places]
    yield tokens, _run_kernel(layer, x[tokens], weights, experts)


def _has_products(layer: RoutedExperts) -> bool:
    """Whether ``layer``'s experts may be computed as products instead of by vLLM's kernel."""
    kernel = layer.quant_method.moe_kernel.fused_experts
    return (
        isinstance(kernel, CPUUnquantizedExperts)
        and kernel.isa == "vec"
        and layer.activation in _ACTIVATIONS
        and not layer.apply_router_weight_on_input
        and has_fast_products(layer.w13_weight.dtype)
        and is_packed_as_known(layer.w13_weight.dtype)
    )


def _expert(layer: RoutedExperts, index: int) -> Expert:
    """Local expert ``index`` of ``layer``."""
    experts = layer.quant_method.moe_kernel.fused_experts
    w13, w2 = unpack(layer.w13_weight[index]), unpack(layer.w2_weight[index])
    biases = [None if bias is None else bias[index] for bias in (experts.w1_bias, experts.w2_bias)]

    def compute(rows: torch.Tensor) -> torch.Tensor:
        gate, up = _product(rows, w13, biases[0]).chunk(2, dim=1)
        # In float32 and rounded once, as vLLM's own activations, which take 2 to 10 times as long.
        inner = _ACTIVATIONS[layer.activation](gate.float()).mul_(up).to(rows.dtype)
        return _product(inner, w2, biases[1])

    return compute


def _product(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return rows @ matrix if bias is None else torch.addmm(bias, rows, matrix)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The matrix (inputs, outputs) of one expert that vLLM packed (outputs, inputs) for "vec"."""
    num_outputs, num_inputs = packed.shape
    groups = packed.view(num_outputs // _COLUMNS, num_inputs, _COLUMNS)
    return groups.permute(1, 0, 2).reshape(num_inputs, num_outputs)


@functools.cache
def is_packed_as_known(dtype: torch.dtype) -> bool:
    """Whether this vLLM packs matrices of ``dtype`` as ``unpack`` expects it."""
    plain = torch.arange(8 * _COLUMNS).view(1, 2 * _COLUMNS, 4).to(dtype)
    return torch.equal(unpack(cpu_prepack_moe_weight(plain, "vec")[0]), plain[0].T)


def _run_kernel(
    layer: RoutedExperts, rows: torch.Tensor, weights: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """Weighted outputs (N, H) of vLLM's kernel for ``rows`` (N, H), one local expert each."""
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
