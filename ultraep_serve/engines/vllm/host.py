"""Expert parallelism on CPU, which vLLM's own CPU kernels do not survive.

They ignore the expert map and read out of bounds for experts of other ranks, but compute local
experts correctly from one row for each assignment. So a layer's kernel is put together anew:
``HostStage`` dispatches and combines, ``HostExperts`` gives vLLM's kernel, or torch's products of
matrices in its place, what this rank computes. Sums are in float32 until they are complete, over
ranks too, so no token's result depends on which rank computed which expert.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import get_ep_group, get_tp_group
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.balance.collectives import all_gather_rows
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.engines.common.cpu_experts import (
    Expert,
    add_up,
    by_expert,
    float32_product,
    is_exact,
    own_type,
)
from ultraep_serve.engines.vllm.checks import has_amx
from ultraep_serve.engines.vllm.layer_checks import check_cpu_execution

_MANY_ROWS = 128  # of an expert on average, from which on products are quicker
_COLUMNS = 16  # outputs of a block in matrices packed for the kernel


def put_in_kernels(layers: Sequence[RoutedExperts], seconds: float) -> None:
    """Have ``layers`` computed with expert parallelism; all ranks together, waiting so long.

    Raises UnsupportedError for a layer that cannot be, PeerTimeoutError.
    """
    for layer in layers:
        check_cpu_execution(layer)
    if has_amx():
        # A process that has not asked for AMX is ended when a kernel uses it. vLLM leaves that to
        # layers that run before its experts, but costs are measured before those run.
        torch.cpu._init_amx()
    own = np.array([has_products(layer) for layer in layers], np.int64)
    usable = all_gather_rows(get_ep_group().cpu_group, own, seconds)
    products = set(itertools.compress(layers, usable.min(axis=0).tolist()))
    for layer in layers:
        stage = HostStage(layer.moe_config)
        kernel = layer.quant_method.moe_kernel.fused_experts
        experts = HostExperts(kernel, stage, with_products=layer in products)
        layer.quant_method.moe_kernel = mk.FusedMoEKernel(stage, experts)


class HostStage(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch and combine between ranks on CPU.

    With tensor parallelism every rank has all tokens: it computes its own part of each, and parts
    are summed. With data parallelism a token goes once to each rank that has experts of it, and
    that rank's part comes home: no rank holds more rows than the batch has tokens.
    """

    def __init__(self, moe: FusedMoEConfig) -> None:
        self._moe = moe
        self._identity = torch.from_numpy(identity_table(moe.num_experts, moe.ep_size, 0))
        self.num_local = self._num_masters = -(-moe.num_experts // moe.ep_size)  # with slots
        self.num_tokens = 0  # of the batch, over all ranks
        self._sent: tuple[torch.Tensor, list[int], list[int]] | None = None

    @property
    def has_many_rows(self) -> bool:
        """Whether experts have many rows in the batch; it does not depend on the plan."""
        assignments = self.num_tokens * self._moe.experts_per_token
        return bool(assignments >= _MANY_ROWS * self._moe.num_experts)

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None, None, torch.Tensor, torch.Tensor]:
        """Rows with local experts and weights, -1 another rank's; ids are physical with slots."""
        ids = topk_ids.long()
        if self.num_local == self._num_masters:
            ids = self._identity[ids]
        rank = torch.div(ids, self.num_local, rounding_mode="floor")  # -1 of padding
        local = (ids - rank * self.num_local).int()
        if self._moe.dp_size > 1:
            return self._send(a1, topk_weights, rank, local)
        self.num_tokens = a1.shape[0]
        own = torch.where(rank == get_ep_group().rank_in_group, local, -1)
        return a1, None, None, own, topk_weights

    def finalize(
        self, output: torch.Tensor, fused_expert_output: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        """Complete sums; ``output`` and what experts gave may be the same memory."""
        if self._moe.dp_size > 1:
            output.copy_(self._home(fused_expert_output.float(), output.shape[0]))
        elif output.numel():
            ranks, faster = get_ep_group(), get_tp_group()  # which reduces in shared memory
            ranks = faster if faster.ranks == ranks.ranks else ranks
            output.copy_(ranks.all_reduce(fused_expert_output))

    def _send(
        self, x: torch.Tensor, weights: torch.Tensor, rank: torch.Tensor, local: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, torch.Tensor, torch.Tensor]:
        group = get_ep_group()
        goes = torch.zeros((x.shape[0], 1 + group.world_size), dtype=torch.bool)
        goes.scatter_(1, 1 + rank, True)  # padding's column comes first
        target, token = goes[:, 1:].T.nonzero(as_tuple=True)
        send = torch.bincount(target, minlength=group.world_size)
        told = torch.stack([send, torch.full_like(send, x.shape[0])], dim=1)  # to each rank
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=group.cpu_group)
        away, here = send.tolist(), heard[:, 0].tolist()
        self.num_tokens = int(heard[:, 1].sum())
        self._sent = token, away, here
        ids = torch.where(rank[token] == target[:, None], local[token], -1)
        rows = _all_to_all(x[token], away, here, group.cpu_group)
        ids = _all_to_all(ids, away, here, group.cpu_group)
        of_rows = _all_to_all(weights[token].float(), away, here, group.cpu_group)
        return rows, None, None, ids, of_rows

    def _home(self, outputs: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Sums (T, H) of all ranks' ``outputs`` (n, H) of this rank's own tokens, in float32."""
        assert self._sent is not None, "rows are sent before they come home"
        token, away, here = self._sent
        rows = _all_to_all(outputs, here, away, get_ep_group().cpu_group)
        total = torch.zeros((num_tokens, outputs.shape[1]), dtype=torch.float32)
        return total.index_add_(0, token, rows)

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> None:
        return None

    def max_num_tokens_per_rank(self) -> None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return True


class HostExperts(CPUUnquantizedExperts):
    """The experts of a rank: for rows (n, H) with k local experts each, sums (n, H) in float32."""

    def __init__(
        self, kernel: mk.FusedMoEExpertsModular, stage: HostStage, *, with_products: bool
    ) -> None:
        """``kernel`` is vLLM's for these experts; ``with_products`` where they have many rows."""
        super().__init__(kernel.moe_config, kernel.quant_config)
        self.kernel, self._stage, self._with_products = kernel, stage, with_products

    def moe_problem_size(self, *tensors: torch.Tensor) -> Any:
        return self.kernel.moe_problem_size(*tensors)

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def workspace_shapes(
        self, M: int, N: int, K: int, *_: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **named: Any,
    ) -> None:
        """Add up in ``output`` what experts give, by part: vLLM's kernel keeps its scratch."""
        named |= {"global_num_experts": w1.shape[0], "expert_map": None}

        def by_kernel(
            rows: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
        ) -> torch.Tensor:
            outputs, of_rows = torch.empty_like(rows), weights[:, None]
            if named["apply_router_weight_on_input"]:
                rows = rows * of_rows.to(rows.dtype)
            self.kernel.apply(outputs, rows, w1, w2, of_rows, experts[:, None], **named)
            return outputs

        compute = by_kernel
        if self._with_products and self._stage.has_many_rows:
            compute = functools.partial(by_products, w1, w2)
        scratch = 4 * (hidden_states.shape[1] + w1.shape[1])  # of vLLM's kernel
        add_up(compute, hidden_states, topk_weights, topk_ids, output, scratch)


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
        return is_exact(functools.partial(by_products, w13, w2), rows, experts)


def by_products(
    w13: torch.Tensor,
    w2: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """See ``Compute``: in the type that this CPU multiplies; ``w13`` and ``w2`` are packed."""
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
