"""Dispatch and combine between processes, under vLLM's own managers and stages.

``deep_ep`` is replaced by a module whose buffers move rows by the arithmetic DeepEP documents:
expert ``e`` of ``n`` lives on rank ``e // (n / R)``.
"""
# ruff: noqa: TID251 - vLLM's own objects are what is tested

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import all2all_utils

TENSOR = ""  # in place of a dispatch backend: every rank has all tokens


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
