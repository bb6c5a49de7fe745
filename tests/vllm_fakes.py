"""What a GPU would bring to vLLM's objects: transports between processes, and expert kernels.

Everything else in these layers is vLLM's own: configurations, expert maps, quantisation methods,
the modular kernel and its prepare and finalize stages. ``deep_ep`` is replaced by a module whose
buffers move rows by the arithmetic DeepEP documents: expert ``e`` of ``n`` lives on rank
``e // (n / R)``.
"""
# ruff: noqa: TID251 - vLLM's own objects are what is tested

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import all2all_utils, unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization import fp8

from ultraep_serve.adapters.vllm.routed_experts import DeviceRoutedExperts

NUM_EXPERTS, HIDDEN, INNER, TOP_K, MAX_TOKENS = (
    12,
    2048,
    16,
    2,
    64,
)  # DeepEP takes no less than 2048
TENSOR = ""  # in place of a dispatch backend: every rank has all tokens


def parallel_of(
    rank: int, num_ranks: int, backend: str, tensor_size: int = 1, **changes: Any
) -> FusedMoEParallelConfig:
    """vLLM's record of one rank's place: data parallel, or tensor parallel without a backend."""
    data_size = num_ranks // tensor_size if backend else 1
    values: dict[str, Any] = {
        "tp_size": 1,
        "pcp_size": 1,
        "dp_size": data_size,
        "ep_size": num_ranks,
        "tp_rank": 0,
        "pcp_rank": 0,
        "dp_rank": rank // tensor_size if backend else 0,
        "ep_rank": rank,
        "sp_size": tensor_size,
        "use_ep": True,
        "all2all_backend": backend or "allgather_reducescatter",
        "enable_eplb": False,
    }
    return FusedMoEParallelConfig(**{**values, **changes})


def engine_config(rank: int, num_ranks: int, backend: str, names: list[str]) -> VllmConfig:
    """vLLM's configuration of one rank whose model has the MoE layers ``names``."""
    data = {"data_parallel_size": num_ranks, "data_parallel_rank": rank} if backend else {}
    config = VllmConfig(
        parallel_config=ParallelConfig(
            enable_expert_parallel=True,
            distributed_executor_backend="external_launcher",
            **({"all2all_backend": backend} if backend else {}),
        )
    )
    for name, value in data.items():
        setattr(config.parallel_config, name, value)
    config.compilation_config.static_all_moe_layers.extend(names)
    return config


def build_layer(
    config: VllmConfig, parallel: FusedMoEParallelConfig, name: str, quant_config: Any = None
) -> DeviceRoutedExperts:
    """A layer as vLLM builds it, weights not loaded."""
    manager = ExpertMapManager(
        max_num_batched_tokens=MAX_TOKENS,
        top_k=TOP_K,
        global_num_experts=NUM_EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    moe = FusedMoEConfig(
        num_experts=NUM_EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=NUM_EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=MAX_TOKENS,
    )
    with set_current_vllm_config(config):
        return DeviceRoutedExperts(
            name, torch.bfloat16, moe, quant_config, expert_map_manager=manager
        )


def load(layer: DeviceRoutedExperts, config: VllmConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Fill parameters from ``tensors`` (E, ...) by name, then do what vLLM's loader does."""
    first = layer.moe_config.ep_rank * layer.local_num_experts
    for name, tensor in tensors.items():
        getattr(layer, name).data.copy_(tensor[first : first + layer.local_num_experts])
    with set_current_vllm_config(config):
        layer.quant_method.process_weights_after_loading(layer)
        layer.update_param_tp_status()


def use_reference_kernels(patch: Any) -> None:
    """Have vLLM choose the kernels below where it would choose Triton's on a GPU."""

    def choose(moe: FusedMoEConfig) -> type[mk.FusedMoEExperts]:
        batched = moe.moe_parallel_config.use_batched_activation_format
        return BatchedTritonExperts if batched else TritonExperts

    patch(
        unquantized_fused_moe_method,
        "select_unquantized_moe_backend",
        lambda moe_config: (UnquantizedMoeBackend.TRITON, choose(moe_config)),
    )
    patch(
        fp8,
        "select_fp8_moe_backend",
        lambda config, **_: (Fp8MoeBackend.TRITON, choose(config)),
    )


class _Reference(mk.FusedMoEExpertsModular):
    """SwiGLU experts in float32 torch, with the contract that vLLM's kernels have."""

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    _supports_no_act_and_mul = _supports_current_device

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    _supports_parallel_config = _supports_activation

    def _expert(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, e: int) -> torch.Tensor:
        first, second = w1[e].float(), w2[e].float()
        if self.w1_scale is not None and self.w2_scale is not None:
            first, second = first * self.w1_scale[e].mean(), second * self.w2_scale[e].mean()
        gate, up = (x.float() @ first.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ second.T


class TritonExperts(_Reference):
    """Rows in any order, global ids, an expert map."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, *_: Any) -> Any:
        return (0,), (0,), (M, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **call: Any) -> None:
        ids, expert_map = call["topk_ids"], call["expert_map"]
        assert call["global_num_experts"] == expert_map.numel() == self.moe_config.num_experts
        assert call["w1"].shape[0] == self.moe_config.num_local_experts
        local = torch.where(ids >= 0, expert_map[ids.long().clamp(min=0)].long(), -1)
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for e in range(call["w1"].shape[0]):
            rows, k = torch.nonzero(local == e, as_tuple=True)
            out = self._expert(hidden_states[rows], call["w1"], call["w2"], e)
            total.index_add_(0, rows, out * call["topk_weights"][rows, k, None].float())
        output.copy_(total)


class BatchedTritonExperts(_Reference):
    """Rows sorted by local expert."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M: int, N: int, K: int, *rest: Any) -> Any:
        return (0,), (0,), (rest[2], M, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **call: Any) -> None:
        assert call["w1"].shape[0] == hidden_states.shape[0] == self.moe_config.num_local_experts
        for e, count in enumerate(call["expert_tokens_meta"].expert_num_tokens.tolist()):
            output[e, :count] = self._expert(hidden_states[e, :count], call["w1"], call["w2"], e)


class Group:
    """vLLM's process group, as far as dispatch and combine use it; gloo moves the bytes."""

    device_communicator: Any = None

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank_in_group, self.world_size = rank, num_ranks
        self.manager: Any = None

    def all_gatherv(self, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> Any:
        return [torch.cat(everywhere(tensor)) for tensor in tensors]

    def reduce_scatterv_into_output(
        self, rows: torch.Tensor, output: torch.Tensor, dim: int, sizes: list[int]
    ) -> torch.Tensor:
        total = sum(part.float() for part in everywhere(rows))
        return output.copy_(total.split(sizes)[self.rank_in_group])

    def dispatch(self, *args: Any, **options: Any) -> Any:
        return self.manager.dispatch(*args, **options)

    def combine_into_output(self, *args: Any, **options: Any) -> Any:
        return self.manager.combine_into_output(*args, **options)

    def allocate_combine_input(self, *args: Any, **options: Any) -> None:
        return None


def everywhere(value: Any) -> list[Any]:
    """``value`` of every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Buffer:
    """DeepEP's ``Buffer``, both modes; ``destroyed`` counts what vLLM's user must free."""

    destroyed = 0
    made: list[dict[str, Any]] = []  # noqa: RUF012 one process, one list
    capture = staticmethod(lambda: None)
    get_dispatch_config = staticmethod(lambda num_ranks: None)
    get_combine_config = get_dispatch_config

    def __init__(self, **arguments: Any) -> None:
        Buffer.made.append(arguments)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def destroy(self) -> None:
        Buffer.destroyed += 1

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> Any:
        assert topk_idx.dtype == torch.int64
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        assert counts.numel() == num_experts, "an id beyond the experts"
        return None, None, counts, None, None

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, **call: Any) -> Any:
        num_local = call["num_tokens_per_expert"].numel() // self.num_ranks
        sent = everywhere((x, topk_idx, call["topk_weights"]))
        rows, ids, weights, sources = [], [], [], []
        for source, (tokens, chosen, weight) in enumerate(sent):
            mine = torch.div(chosen, num_local, rounding_mode="floor") == self.rank
            token = torch.nonzero(mine.any(1)).squeeze(1)
            rows.append(tokens[token])
            ids.append(torch.where(mine, chosen - self.rank * num_local, -1)[token])
            weights.append(torch.where(mine, weight, 0)[token])
            sources += [(source, int(index)) for index in token]
        local = torch.cat(ids)
        counts = torch.bincount(local[local >= 0], minlength=num_local).tolist()
        event = SimpleNamespace(event=None)
        return torch.cat(rows), local, torch.cat(weights), counts, (sources, x.shape[0]), event

    def combine(self, x: torch.Tensor, handle: Any, **_: Any) -> Any:
        sources, num_tokens = handle
        total = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32)
        for rows, where in everywhere((x, sources)):
            for row, (source, token) in zip(rows, where, strict=True):
                if source == self.rank:
                    total[token] += row.float()
        return total.to(x.dtype), None, SimpleNamespace(event=None)

    @staticmethod
    def get_low_latency_rdma_size_hint(**sizes: int) -> int:
        return sizes["num_experts"]

    def low_latency_dispatch(
        self, x: torch.Tensor, ids: torch.Tensor, max_tokens: int, num_experts: int, **_: Any
    ) -> Any:
        assert x.shape[0] <= max_tokens
        num_local = num_experts // self.num_ranks
        out = x.new_zeros(num_local, max_tokens * self.num_ranks, x.shape[1])
        counts = torch.zeros(num_local, dtype=torch.int32)
        handle: dict[tuple[int, int, int], tuple[int, int]] = {}
        for source, (tokens, chosen) in enumerate(everywhere((x, ids))):
            for token, k in torch.nonzero(chosen >= 0).tolist():
                rank, local = divmod(int(chosen[token, k]), num_local)
                if rank == self.rank:
                    out[local, counts[local]] = tokens[token]
                    handle[source, token, k] = (local, int(counts[local]))
                    counts[local] += 1
        return out, counts, handle, None, lambda: None

    def low_latency_combine(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any, **call: Any
    ) -> Any:
        total = torch.zeros(call["out"].shape, dtype=torch.float32)
        for rows, where in everywhere((x, handle)):
            for (source, token, k), (local, row) in where.items():
                if source == self.rank:
                    total[token] += rows[local, row].float() * weights[token, k]
        call["out"].copy_(total)
        return None, None, lambda: None


def install_deep_ep() -> None:
    """Make ``deep_ep`` importable, and vLLM's classes for it known where it looks for them."""
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.Config, module.EventOverlap = Buffer, object, object
    sys.modules["deep_ep"] = module
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

    utils: Any = all2all_utils
    utils.DeepEPHTPrepareAndFinalize = deepep_ht.DeepEPHTPrepareAndFinalize
    utils.DeepEPLLPrepareAndFinalize = deepep_ll.DeepEPLLPrepareAndFinalize
    utils.DEEPEP_QUANT_BLOCK_SHAPE = deepep_ll.DEEPEP_QUANT_BLOCK_SHAPE


def join_ranks(rank: int, num_ranks: int, backend: str) -> None:
    """Give vLLM the groups that it would have made, with its own dispatch manager in them."""
    from vllm.distributed.device_communicators import all2all

    group: Any = Group(rank, num_ranks)
    state: Any = parallel_state
    state._EP = state._DP = group
    state._TP = state._PCP = Group(0, 1)
    state._NODE_COUNT = 1
    managers: dict[str, Any] = {
        TENSOR: None,
        "allgather_reducescatter": all2all.AgRsAll2AllManager,
        "deepep_high_throughput": all2all.DeepEPHTAll2AllManager,
        "deepep_low_latency": all2all.DeepEPLLAll2AllManager,
    }
    if managers[backend] is not None:
        manager = managers[backend].__new__(managers[backend])
        manager.cpu_group, manager.internode, manager.num_sms = None, False, 20
        manager.rank, manager.world_size, manager.dp_world_size = rank, num_ranks, num_ranks
        manager.use_ep, manager.support_fault_tolerance = True, False
        manager.handle_cache = all2all.Cache()
        group.manager = manager
        group.device_communicator = SimpleNamespace(
            all2all_manager=manager, get_symmetric_memory_buffer=lambda *_: None
        )


@dataclass(frozen=True)
class Batch:
    """What the router of one rank gives."""

    x: torch.Tensor  # (T, H)
    ids: torch.Tensor  # (T, K) logical, -1 padding
    weights: torch.Tensor  # (T, K)


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """Experts that differ, by parameter name."""
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    w2 = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5
    return {"w13_weight": w13.bfloat16(), "w2_weight": w2.bfloat16()}


def make_batch(seed: int, num_tokens: int, ids_type: torch.dtype) -> Batch:
    """Tokens of which three in four choose among the first rank's experts; the last is padding."""
    generator = torch.Generator().manual_seed(seed)
    favour = torch.ones(NUM_EXPERTS)
    favour[: NUM_EXPERTS // 3] = 6.0
    ids = torch.multinomial(favour.expand(num_tokens, -1), TOP_K, generator=generator)
    if num_tokens > 1:
        ids[-1] = -1
    return Batch(
        torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
        ids.to(ids_type),
        torch.rand(num_tokens, TOP_K, generator=generator),
    )


def expected_output(batch: Batch, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What every expert at home would give, (T, H) float32."""
    total = torch.zeros(batch.x.shape)
    for k in range(TOP_K):
        for token, e in enumerate(batch.ids[:, k].tolist()):
            if e >= 0:
                gate, up = (tensors["w13_weight"][e].float() @ batch.x[token].float()).chunk(2)
                out = tensors["w2_weight"][e].float() @ (torch.nn.functional.silu(gate) * up)
                total[token] += out * batch.weights[token, k]
    return total
