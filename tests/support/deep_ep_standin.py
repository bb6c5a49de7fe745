"""``deep_ep`` without GPUs: buffers that move rows between processes over gloo.

By the arithmetic that DeepEP documents: expert ``e`` of ``n`` lives on rank ``e // (n / R)``.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Buffer", "everywhere", "install_deep_ep"]

_DONE = SimpleNamespace(event=None, current_stream_wait=lambda: None)


def everywhere(value: Any) -> list[Any]:
    """``value`` of every rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class _Sizes:
    """What DeepEP's ``Config`` tells of the memory it needs."""

    def __init__(self, *_: Any) -> None:
        pass

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    """DeepEP's ``Buffer``, both modes; ``made`` lists what memory for low latency was asked for."""

    num_sms = 20
    made: list[int] = []  # noqa: RUF012 one process, one list
    capture = staticmethod(lambda: None)
    get_dispatch_config = _Sizes
    get_combine_config = _Sizes

    def __init__(
        self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any
    ) -> None:
        type(self).made.append(num_rdma_bytes)
        self.low_latency_mode = bool(options.get("low_latency_mode"))
        self.rank, self.group_size = dist.get_rank(), dist.get_world_size()

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> Any:
        assert topk_idx.dtype == torch.int64
        counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        assert counts.numel() == num_experts, "an id beyond the experts"
        return None, None, counts, None, None

    def dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor, **call: Any) -> Any:
        """Rows that have something to do here, once each, with local ids."""
        num_local = call["num_tokens_per_expert"].numel() // self.group_size
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
        return torch.cat(rows), local, torch.cat(weights), counts, (sources, x.shape[0]), _DONE

    def combine(self, x: torch.Tensor, handle: Any, **_: Any) -> Any:
        sources, num_tokens = handle
        total = torch.zeros(num_tokens, x.shape[1], dtype=torch.float32)
        for rows, where in everywhere((x, sources)):
            for row, (source, token) in zip(rows, where, strict=True):
                if source == self.rank:
                    total[token] += row.float()
        return total.to(x.dtype), None, _DONE

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_experts  # so that ``made`` tells them

    def clean_low_latency_buffer(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        assert num_experts % self.group_size == 0

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int, **_: Any
    ) -> Any:
        """Rows by local expert, one for each assignment."""
        assert x.shape[0] <= max_tokens, "more tokens than the buffer holds"
        num_local = num_experts // self.group_size
        out = x.new_zeros(num_local, max_tokens * self.group_size, x.shape[1])
        counts = torch.zeros(num_local, dtype=torch.int32)
        handle: dict[tuple[int, int, int], tuple[int, int]] = {}
        for source, (tokens, chosen) in enumerate(everywhere((x, topk_idx))):
            for token, k in torch.nonzero(chosen >= 0).tolist():
                rank, local = divmod(int(chosen[token, k]), num_local)
                if rank == self.rank:
                    out[local, counts[local]] = tokens[token]
                    handle[source, token, k] = (local, int(counts[local]))
                    counts[local] += 1
        return out, counts, handle, _DONE, lambda: None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        out: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        total = torch.zeros(topk_idx.shape[0], x.shape[-1], dtype=torch.float32)
        for rows, where in everywhere((x, handle)):
            for (source, token, k), (local, row) in where.items():
                if source == self.rank:
                    total[token] += rows[local, row].float() * topk_weights[token, k]
        combined = total.to(x.dtype) if out is None else out.copy_(total)
        return combined, _DONE, lambda: None


def install_deep_ep(buffer: type[Buffer] = Buffer) -> None:
    """Make ``deep_ep`` importable; before an engine looks for it."""
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.Config, module.EventOverlap = buffer, _Sizes, object
    sys.modules["deep_ep"] = module
