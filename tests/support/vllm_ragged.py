"""The collectives that vLLM is going to have for data-parallel ranks on CPU, over those it has."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, when vLLM has it compile
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.parallel_state import GroupCoordinator

__all__ = ["join_group", "ragged_communicator"]


class RaggedCommunicator(CpuCommunicator):
    """With the two collectives of vllm-project/vllm#47778, by their interface there."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        assert sizes is not None
        if not isinstance(input_, torch.Tensor):
            return [self.all_gatherv(part, dim, sizes) for part in input_]
        assert input_.shape[0] == sizes[self.rank_in_group]
        room = input_.new_zeros(max(sizes), *input_.shape[1:])
        room[: input_.shape[0]] = input_
        gathered = input_.new_empty(self.world_size * max(sizes), *input_.shape[1:])
        self.dist_module.all_gather_into_tensor(gathered, room, group=self.device_group)
        chunks = gathered.split(max(sizes))
        return torch.cat([chunk[:size] for chunk, size in zip(chunks, sizes, strict=True)])

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0
        assert sizes is not None
        assert sum(sizes) == input_.shape[0]
        total = self.all_reduce(input_.contiguous().clone())
        return total.split(sizes)[self.rank_in_group].contiguous()


def join_group(rank: int, num_ranks: int, path: str) -> GroupCoordinator:
    """This process's group of vLLM's, as it is today.

    ``path`` is a run path of ``fresh_run_path``, the same on all ranks.
    """
    os.environ["VLLM_DIST_IDENT"] = Path(path).name  # of their shared memory
    store = dist.FileStore(f"{path}/gloo", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    return GroupCoordinator([list(range(num_ranks))], rank, "gloo", True, group_name="tp")


def ragged_communicator(group: GroupCoordinator, in_shared_memory: bool) -> CpuCommunicator:
    """What ``group`` is going to have, in shared memory or by gloo.

    vLLM decides that by the group's name: today only tensor-parallel ranks share memory.
    """
    name = "tp:1" if in_shared_memory else "dp:1"
    return RaggedCommunicator(group.cpu_group, group.device, group.device_group, name)
