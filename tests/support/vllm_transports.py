"""Dispatch and combine between processes, under vLLM's own managers and stages.

DeepEP's is in ``deep_ep_standin``.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import all2all_utils

from tests.support import deep_ep_standin
from tests.support.deep_ep_standin import everywhere

TENSOR = ""  # in place of a dispatch backend: every rank has all tokens


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


class Buffer(deep_ep_standin.Buffer):
    """What vLLM asks of it beyond that; ``destroyed`` counts what its user must free."""

    destroyed = 0

    def destroy(self) -> None:
        Buffer.destroyed += 1


def install_deep_ep() -> None:
    """Make ``deep_ep`` importable, and vLLM's classes for it known where it looks for them."""
    deep_ep_standin.install_deep_ep(Buffer)
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
    state._EP = state._DP = state._WORLD = group
    state._TP = state._PCP = state._PP = Group(0, 1)
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
