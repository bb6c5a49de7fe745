"""Expert parallelism on CPU, which vLLM's own CPU kernel does not survive.

vLLM's kernel ignores the expert map and reads out of bounds for experts of other ranks. It computes
local experts correctly from one row per assignment, so that is what it gets here: rows are gathered
(tensor parallel: every rank has all tokens) or sent to the rank that computes them (data parallel),
and added back per token, weighted. Where vLLM itself can gather tokens of data-parallel ranks on
CPU (vllm-project/vllm#47778, in no release yet), ranks have all tokens then too.

With many rows of an expert, torch's products of matrices take the kernel's place where that one
does not use what this CPU multiplies quickly (``Products``). The tokens of all ranks decide it for
a batch, so that it does not depend on the rank that computes a token.

Sums are taken in float32 until they are complete, across ranks too: weighted outputs in bfloat16
have 8 significant bits, so that is exact unless they differ in size by more than 2**13. So no
token's result depends on which rank computed which expert.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import get_dp_group, get_ep_group, get_tp_group
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import HostAllGather
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.cpu_experts import (
    Compute,
    Expert,
    added_up,
    by_expert,
    float32_product,
    is_exact,
    own_type,
)
from ultraep_serve.engines.common.execution import Execution
from ultraep_serve.engines.vllm.checks import check_cpu_execution, has_amx
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values

__all__ = [
    "Assignments",
    "CpuExperts",
    "by_kernel",
    "by_products",
    "compute_and_reduce",
    "dispatch_compute_combine",
    "gather_compute_scatter",
    "has_products",
    "has_ragged_collectives",
]

_MOST_SCRATCH = 1 << 30  # bytes for the rows of a call of vLLM's kernel, which it keeps
_MANY_ROWS = 128  # of an expert on average, from which on products are quicker
_COLUMNS = 16  # outputs of a block in matrices packed for the kernel


@dataclass(frozen=True)
class Assignments:
    """Where each (token, k) pair is computed."""

    rank: torch.Tensor  # (T, K) int64 target rank, -1 padding
    local: torch.Tensor  # (T, K) int32 expert on that rank

    @classmethod
    def from_physical(cls, physical: torch.Tensor, num_local: int) -> "Assignments":
        """Split physical ids (T, K) = rank * num_local + local, -1 padding."""
        rank = torch.div(physical, num_local, rounding_mode="floor").long()
        return cls(rank=rank, local=(physical - rank * num_local).int())


class CpuExperts(Execution[RoutedExperts]):
    """``Execution`` on CPU, where the adapter dispatches, computes experts and combines."""

    num_micro_batches = 1

    def __init__(self, config: BalanceConfig) -> None:
        """Ask the operating system for AMX, where the CPU has it.

        A process that has not asked is ended when a kernel uses AMX. vLLM's kernels for experts
        leave that to layers that run before them, but costs are measured before those run.
        """
        if has_amx():
            torch.cpu._init_amx()
        self._seconds = config.timeout_seconds * CONNECT_FACTOR
        self._by_products: set[RoutedExperts] = set()
        self._num_local = 0  # physical experts per rank
        self._identity: torch.Tensor | None = None  # physical ids (E,) where there are no slots

    def check(self, layer: RoutedExperts) -> None:
        check_cpu_execution(layer)

    def take_over(self, layers: Sequence[RoutedExperts]) -> None:
        """Put our dispatch and combine in place, with slots or without; all ranks together.

        Raises UnsupportedError for a layer that they cannot run, PeerTimeoutError.
        """
        parallel = layers[0].moe_config.moe_parallel_config
        if parallel.use_ep:
            for layer in layers:
                check_cpu_execution(layer)
                take_over_combine(layer)
            ranks = HostAllGather(get_ep_group().cpu_group, self._seconds)
            usable = ranks.gather(np.array([has_products(layer) for layer in layers], np.int64))
            self._by_products = set(itertools.compress(layers, usable.min(axis=0).tolist()))
        num_experts, num_ranks = layers[0].global_num_experts, parallel.ep_size
        self._num_local = -(-num_experts // num_ranks)
        self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

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

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Physical ids (T, K) of masters where there are no slots; padding -1 kept."""
        assert self._identity is not None, "layers are taken over first"
        return self._identity[topk_ids.long()]

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """Complete output (T, H) for this rank's tokens ``x`` (T, H)."""
        group, chosen = get_ep_group(), functools.partial(self._chosen, layer)
        assignments = Assignments.from_physical(physical, self._num_local)
        if layer.moe_config.dp_size == 1:
            own = torch.where(assignments.rank == group.rank_in_group, assignments.local, -1)
            return compute_and_reduce(chosen(x.shape[0]), x, topk_weights, own, group)
        if has_ragged_collectives(data := get_dp_group()):
            return gather_compute_scatter(chosen, x, topk_weights, assignments, data)
        return dispatch_compute_combine(chosen, x, topk_weights, assignments, group.cpu_group)

    def _chosen(self, layer: RoutedExperts, num_tokens: int) -> Compute:
        """What computes ``layer`` for a batch of ``num_tokens`` of all ranks."""
        many = num_tokens * layer.top_k >= _MANY_ROWS * layer.moe_config.num_experts
        compute = by_products if many and layer in self._by_products else by_kernel
        return functools.partial(compute, layer)


def take_over_combine(layer: RoutedExperts) -> None:
    """Tell vLLM that ``layer``'s output comes complete, so that it does not reduce it again.

    Uses the stage vLLM has for experts that dispatch and combine themselves.
    """
    experts = layer.quant_method.moe_kernel.fused_experts
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(PassThroughPrepareAndFinalize(), experts)


def compute_and_reduce(
    compute: Compute,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    own: torch.Tensor,
    group: GroupCoordinator,
) -> torch.Tensor:
    """Complete output (T, H) where every rank of ``group`` has all tokens ``x`` (T, H).

    ``topk_weights`` (T, K); ``own`` (T, K) int32, experts of this rank, -1 for another rank's.
    """
    total: torch.Tensor = _group_to_reduce(group).all_reduce(_part(compute, x, topk_weights, own))
    return total.to(x.dtype)


def _group_to_reduce(ranks: GroupCoordinator) -> GroupCoordinator:
    """Return the tensor-parallel group if it has the same ranks: it reduces in shared memory."""
    same: GroupCoordinator = get_tp_group()
    return same if same.ranks == ranks.ranks else ranks


def _part(
    compute: Compute, x: torch.Tensor, topk_weights: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """This rank's part of the output, (T, H) float32."""
    with expert_clock:
        tokens, k = (own >= 0).nonzero(as_tuple=True)
        rows = compute(x.index_select(0, tokens), topk_weights[tokens, k].float(), own[tokens, k])
        return added_up(rows, tokens, x.shape[0])


def has_ragged_collectives(group: GroupCoordinator) -> bool:
    """Whether vLLM gathers and scatters rows (n, ...) of ``group``'s ranks, n as each has them."""
    own, base = type(group.device_communicator), DeviceCommunicatorBase
    return issubclass(own, base) and (
        own.all_gatherv is not base.all_gatherv and own.reduce_scatterv is not base.reduce_scatterv
    )


def gather_compute_scatter(
    chosen: Callable[[int], Compute],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: GroupCoordinator,
) -> torch.Tensor:
    """Complete output (T, H) for this rank's own tokens ``x`` (T, H), by vLLM's own collectives.

    Arguments as ``dispatch_compute_combine``; ranks of ``group`` may have different T.
    """
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(group.world_size)]
    dist.all_gather(counts, torch.tensor([x.shape[0]]), group=group.cpu_group)
    sizes = [int(count) for count in counts]
    # vLLM's shared memory carries floating point only; float32 holds ranks and slots exactly
    told = [part.float() for part in (topk_weights, assignments.rank, assignments.local)]
    rows, heard = group.all_gatherv([x, torch.cat(told, dim=1)], 0, sizes)
    weights, rank, local = heard.chunk(3, dim=1)
    own = torch.where(rank == group.rank_in_group, local, -1).to(assignments.local.dtype)
    part = _part(chosen(sum(sizes)), rows, weights, own)
    total: torch.Tensor = group.reduce_scatterv(part, 0, sizes)
    return total.to(x.dtype)


def dispatch_compute_combine(
    chosen: Callable[[int], Compute],
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    assignments: Assignments,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Complete output (T, H) for this rank's own tokens ``x`` (T, H), through all-to-all.

    ``chosen`` is asked what computes so many tokens of all ranks. Every assignment comes home as a
    row of its own.
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
    weights = _all_to_all(topk_weights.reshape(-1)[order].float(), away, here, group)
    with expert_clock:
        outputs = chosen(int(heard[:, 1].sum()))(rows, weights, local)
    home = _all_to_all(outputs, here, away, group)
    # added up in the order of a token's experts, wherever they were computed
    by_token = torch.argsort(order)
    return added_up(home[by_token], tokens[by_token], x.shape[0]).to(x.dtype)


def by_kernel(
    layer: RoutedExperts, rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See ``Compute``: by vLLM's kernel, in parts for which it has room."""
    outputs, weights, experts = torch.empty_like(rows), weights[:, None], experts[:, None]
    on_input = layer.apply_router_weight_on_input
    if on_input:
        rows = rows * weights.to(rows.dtype)
    most = max(1, _MOST_SCRATCH // (4 * (rows.shape[1] + layer.w13_weight.shape[1])))
    empty = rows.new_empty(0)
    parts = (torch.split(tensor, most) for tensor in (outputs, rows, weights, experts))
    for output, some, of_rows, ids in zip(*parts, strict=True):
        if not some.shape[0]:
            continue
        layer.quant_method.moe_kernel.fused_experts.apply(
            output=output,
            hidden_states=some,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=of_rows,
            topk_ids=ids,
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


def has_products(layer: RoutedExperts) -> bool:
    """Whether torch's products compute ``layer`` as vLLM's kernel does, and more quickly.

    Where that kernel multiplies bfloat16 without instructions for it, in AVX512-BF16 or by AMX:
    torch uses the former, and widens to float32 where there are none. They must also give a row
    the same whatever is beside it, which torch's do not on every CPU.
    """
    kernel = layer.quant_method.moe_kernel.fused_experts
    return (
        isinstance(kernel, CPUUnquantizedExperts)
        and kernel.isa == "vec"
        and kernel.w1_bias is kernel.w2_bias is None
        and layer.activation is MoEActivation.SILU
        and not layer.apply_router_weight_on_input
        and layer.w13_weight.dtype is torch.bfloat16
        and _is_packed_as_known()
        and _is_exact(layer.w13_weight.shape[1:], layer.w2_weight.shape[1:])
    )


@functools.cache
def _is_packed_as_known() -> bool:
    """Whether this vLLM packs matrices for "vec" as ``_unpacked`` expects it."""
    plain = torch.arange(8 * _COLUMNS, dtype=torch.bfloat16).view(1, 2 * _COLUMNS, 4)
    return torch.equal(_unpacked(cpu_prepack_moe_weight(plain, "vec")[0]), plain[0])


@functools.cache
def _is_exact(w13_shape: torch.Size, w2_shape: torch.Size) -> bool:
    """Whether products of matrices (2I, H) and (H, I) are, see ``is_exact``."""
    generator = torch.Generator().manual_seed(0)
    w13, w2, rows = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((2, *w13_shape), (2, *w2_shape), (2 * _MANY_ROWS, w2_shape[0]))
    )
    experts = torch.randint(2, rows.shape[:1], generator=generator)
    with torch.inference_mode():
        return is_exact(functools.partial(_by_products, w13, w2), rows, experts)


def by_products(
    layer: RoutedExperts, rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """See ``Compute``: by torch's products, in the type that this CPU multiplies quickly."""
    return _by_products(layer.w13_weight, layer.w2_weight, rows, weights, experts)


def _by_products(
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    dtype = own_type(w13.dtype)
    product = float32_product if dtype is torch.float32 else F.linear

    def expert(index: int) -> Expert:
        to_inner, to_output = _unpacked(w13[index]).to(dtype), _unpacked(w2[index]).to(dtype)

        def compute(some: torch.Tensor) -> torch.Tensor:
            gate, up = product(some.to(dtype), to_inner).chunk(2, dim=1)
            # In float32 and rounded once, as vLLM's own, which takes 2 to 10 times as long.
            return product(F.silu(gate.float()).mul_(up).to(dtype), to_output)

        return compute

    return by_expert(expert, w13.shape[0], rows, weights, experts)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """The matrix (outputs, inputs) that vLLM's kernel has as ``packed``: in blocks of outputs.

    Those of one input lie beside each other there.
    """
    num_outputs, num_inputs = packed.shape
    blocks = packed.view(num_outputs // _COLUMNS, num_inputs, _COLUMNS)
    return blocks.transpose(1, 2).reshape(num_outputs, num_inputs)


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
