"""Dispatch and combine between processes, under vLLM's own managers and stages.

What DeepEP and FlashInfer would do is in ``tests/emulated_gpu/references``.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import all2all_utils

from tests.emulated_gpu.references import deep_ep, flashinfer
from tests.emulated_gpu.references.deep_ep import everywhere

TENSOR = ""  # in place of a dispatch backend: every rank has all tokens
MEGA = "passthrough"  # the kernel dispatches


class Group:
    """vLLM's process group, as far as dispatch and combine use it; gloo moves the bytes."""

    device_communicator: Any = None

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank_in_group, self.world_size = rank, num_ranks
        self.cpu_group = self.device_group = dist.group.WORLD if dist.is_initialized() else None
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


class Buffer(deep_ep.Buffer):
    """What vLLM asks of it beyond that; ``destroyed`` counts what its user must free."""

    destroyed = 0

    def destroy(self) -> None:
        Buffer.destroyed += 1


def install_libraries() -> None:
    """Make libraries importable, and vLLM's classes for them known where it looks for them."""
    deep_ep.install_deep_ep(Buffer)
    flashinfer.install_flashinfer()
    from vllm.distributed.device_communicators import all2all
    from vllm.model_executor.layers.fused_moe.prepare_finalize import (
        deepep_ht,
        deepep_ll,
        deepep_v2,
    )
    from vllm.utils import flashinfer as library

    utils: Any = all2all_utils
    utils.DeepEPHTPrepareAndFinalize = deepep_ht.DeepEPHTPrepareAndFinalize
    utils.DeepEPLLPrepareAndFinalize = deepep_ll.DeepEPLLPrepareAndFinalize
    utils.DEEPEP_QUANT_BLOCK_SHAPE = deepep_ll.DEEPEP_QUANT_BLOCK_SHAPE
    utils.DeepEPV2PrepareAndFinalize = deepep_v2.DeepEPV2PrepareAndFinalize
    deepep_v2._globalize_recv_topk_idx = _globalised  # type: ignore[assignment]
    there: Any = library
    there.has_flashinfer_nvlink_two_sided = lambda: True  # vLLM 0.32's communicator asks for it
    managers: Any = all2all
    managers.has_flashinfer_nvlink_one_sided = lambda: True
    managers.MoeAlltoAll, managers.Mapping = flashinfer.MoeAlltoAll, flashinfer._mapping
    managers.MnnvlConfig = flashinfer._config
    managers.moe_a2a_get_workspace_size_per_rank = flashinfer.moe_a2a_get_workspace_size_per_rank
    accelerator: Any = torch.accelerator
    accelerator.empty_cache = accelerator.synchronize = lambda: None
    accelerator.device_count = accelerator.current_device_index = lambda: 0


def _globalised(
    ids: torch.Tensor, received: torch.Tensor, offset: int, num_experts: int
) -> torch.Tensor:
    """What vLLM's Triton kernel of that name does."""
    own = (ids >= 0) & (ids + offset < num_experts)
    own &= torch.arange(len(ids))[:, None] < received[-1]
    return ids.copy_(torch.where(own, ids + offset, -1))


def join_ranks(rank: int, num_ranks: int, backend: str) -> None:
    """Give vLLM the groups that it would have made, with its own dispatch manager in them."""
    from vllm.distributed.device_communicators import all2all

    group: Any = Group(rank, num_ranks)
    state: Any = parallel_state
    state._EP = state._DP = state._WORLD = group
    state._TP = state._PCP = state._PP = Group(0, 1)
    state._NODE_COUNT = 1
    managers: dict[str, Any] = {
        TENSOR: None,
        MEGA: None,
        "allgather_reducescatter": all2all.AgRsAll2AllManager,
        "deepep_high_throughput": all2all.DeepEPHTAll2AllManager,
        "deepep_low_latency": all2all.DeepEPLLAll2AllManager,
        "deepep_v2": all2all.DeepEPV2All2AllManager,
        "flashinfer_nvlink_one_sided": all2all.FlashInferNVLinkOneSidedManager,
    }
    if managers[backend] is not None:
        group.device_communicator = SimpleNamespace(get_symmetric_memory_buffer=lambda *_: None)
        if managers[backend] is all2all.FlashInferNVLinkOneSidedManager:
            manager = managers[backend](group.cpu_group)
        else:
            manager = managers[backend].__new__(managers[backend])
            manager.cpu_group = None
        manager.internode, manager.num_sms = False, 20
        manager._device_group, manager._num_sms, manager._gin_checked = None, None, True
        manager.rank, manager.world_size, manager.dp_world_size = rank, num_ranks, num_ranks
        manager.use_ep, manager.support_fault_tolerance = True, False
        manager.handle_cache = all2all.Cache()
        group.manager = manager
        group.device_communicator.all2all_manager = manager
