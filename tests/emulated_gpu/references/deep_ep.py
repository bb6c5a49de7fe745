"""``deep_ep`` without GPUs: buffers that move rows between processes over a group's collectives.

By the contracts that DeepEP documents, in ``deep_ep/buffers/legacy.py`` (``Buffer``) and
``deep_ep/buffers/elastic.py`` (``ElasticBuffer``, which vLLM calls ``deepep_v2``) at commit
dd758caf: expert ``e`` of ``n`` lives on rank ``e // (n / R)``, -1 is no expert, sums are taken in
float32 and sent in bfloat16. Rows arrive by source rank and token; what nobody wrote holds rubbish.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

__all__ = ["Buffer", "ElasticBuffer", "everywhere", "install_deep_ep"]

Rows: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]  # with scales, of the same rows

_DONE = SimpleNamespace(event=None, current_stream_wait=lambda: None)
RUBBISH = 1e4


def everywhere(value: Any, group: Any = None) -> list[Any]:
    """``value`` of every rank, its tensors in the host's memory."""
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _on_host(value), group)
    return found


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


class _Sizes:
    """What DeepEP's ``Config`` tells of the memory it needs."""

    def __init__(self, *_: Any) -> None:
        pass

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class _Exchange:
    """What both kinds of buffer do: who sends what, and what of it comes here."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)

    def destroy(self) -> None:
        """Nothing to free."""

    def _received(
        self, x: Rows, ids: torch.Tensor, weights: torch.Tensor, num_experts: int
    ) -> tuple[list[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows with something to do here, local ids, weights, and (source, token) of each."""
        assert num_experts % self.group_size == 0
        assert ids.dtype == torch.int64
        assert not ids.numel() or int(ids.max()) < num_experts, "an id beyond the experts"
        num_local = num_experts // self.group_size
        rows, chosen, by_weight, sources = [], [], [], []
        sent = everywhere((x if isinstance(x, tuple) else (x,), ids, weights), self.group)
        for source, (tokens, every, weight) in enumerate(sent):
            mine = torch.div(every, num_local, rounding_mode="floor") == self.rank
            token = torch.nonzero(mine.any(1)).view(-1)
            rows.append([part[token] for part in tokens])
            chosen.append(torch.where(mine, every - self.rank * num_local, -1)[token])
            by_weight.append(torch.where(mine, weight, 0)[token])
            sources.append(torch.stack([torch.full_like(token, source), token], 1))
        parts = [torch.cat(each) for each in zip(*rows, strict=True)]
        return parts, torch.cat(chosen), torch.cat(by_weight), torch.cat(sources)

    def _returned(self, x: torch.Tensor, sources: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Sums of what all ranks computed for each of this rank's tokens."""
        assert len(x) == len(sources)
        total = torch.zeros(num_tokens, x.shape[1])
        for rows, where in everywhere((x, sources), self.group):
            mine = where[:, 0] == self.rank
            total.index_add_(0, where[mine, 1], rows[mine].float())
        return total.to(x)


class Buffer(_Exchange):
    """DeepEP's ``Buffer``, both modes; ``made`` lists what memory for low latency was asked for."""

    num_sms = 20
    made: list[int] = []  # noqa: RUF012 one process, one list
    capture = staticmethod(lambda: None)
    get_dispatch_config = _Sizes
    get_combine_config = _Sizes

    def __init__(
        self, group: Any = None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, **options: Any
    ) -> None:
        super().__init__(group)
        type(self).made.append(num_rdma_bytes)
        self.low_latency_mode = bool(options.get("low_latency_mode"))

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> Any:
        assert topk_idx.dtype == torch.int64
        counts = torch.bincount(topk_idx[topk_idx >= 0].cpu(), minlength=num_experts)
        assert counts.numel() == num_experts, "an id beyond the experts"
        return None, None, counts, None, None

    def dispatch(self, x: Rows, topk_idx: torch.Tensor, **call: Any) -> Any:
        """Rows that have something to do here, once each, with local ids.

        Experts' numbers of rows are rounded up to whole ``expert_alignment``.
        """
        num_experts, device = call["num_tokens_per_expert"].numel(), topk_idx.device
        aligned = call.get("expert_alignment", 1)
        rows, local, weights, sources = self._received(
            x, topk_idx, call["topk_weights"], num_experts
        )
        minlength = num_experts // self.group_size
        counts = torch.bincount(local[local >= 0], minlength=minlength)
        counts = (-(-counts // aligned) * aligned).tolist()
        received = tuple(part.to(device) for part in rows)
        handle = sources, len(topk_idx)
        given = received if isinstance(x, tuple) else received[0]
        return given, local.to(device), weights.to(device), counts, handle, _DONE

    def combine(self, x: torch.Tensor, handle: Any, **_: Any) -> Any:
        sources, num_tokens = handle
        return self._returned(x, sources, num_tokens), None, _DONE

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return num_experts  # so that ``made`` tells them

    def clean_low_latency_buffer(self, max_tokens: int, hidden: int, num_experts: int) -> None:
        assert num_experts % self.group_size == 0

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        """Rows by local expert, one for each assignment."""
        assert x.shape[0] <= max_tokens, "more tokens than the buffer holds"
        if (use_fp8 and x.is_cuda) or round_scale or use_ue8m0:
            raise NotImplementedError("no values for a dispatch that quantises")
        assert not len(x) or int(topk_idx.max()) < num_experts, "an id beyond the experts"
        num_local = num_experts // self.group_size
        shape = num_local, max_tokens * self.group_size, x.shape[1]
        out = torch.full(shape, RUBBISH).to(x.dtype)
        counts = torch.zeros(num_local, dtype=torch.int32)
        places = []  # (source, token, k, expert, row)
        for source, (tokens, chosen) in enumerate(everywhere((x, topk_idx), self.group)):
            for expert in range(num_local):
                token, k = torch.nonzero(chosen == self.rank * num_local + expert, as_tuple=True)
                row = torch.arange(len(token)) + int(counts[expert])
                out[expert, row] = tokens[token]
                counts[expert] += len(token)
                same = [torch.full_like(token, number) for number in (source, expert)]
                places.append(torch.stack([same[0], token, k, same[1], row], 1))
        device = x.device
        return out.to(device), counts.to(device), torch.cat(places), _DONE, lambda: None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> Any:
        assert not zero_copy
        own, total = topk_weights.cpu(), torch.zeros(topk_idx.shape[0], x.shape[-1])
        for rows, where in everywhere((x, handle), self.group):
            _, token, k, expert, row = where[where[:, 0] == self.rank].T
            weighted = rows[expert, row].float() * own[token, k].float()[:, None]
            total.index_add_(0, token, weighted)
        combined = total.to(x) if out is None else out.copy_(total)
        return combined, _DONE, lambda: None


class ElasticBuffer(_Exchange):
    """DeepEP's second buffer, in one logical domain: rows once per rank, or once per expert."""

    made: list[dict[str, Any]] = []  # noqa: RUF012 one process, one list

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        explicitly_destroy: bool = False,
    ) -> None:
        super().__init__(group)
        type(self).made.append({"hidden": hidden, "num_topk": num_topk})
        self.num_max_tokens_per_rank = num_max_tokens_per_rank

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        assert num_experts % self.group_size == 0
        return 20

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool = True,
        async_with_compute_stream: bool = False,
    ) -> Any:
        """By expert (``do_expand``), or by source rank with local ids, in as many rows as may come.

        Without ``do_cpu_sync`` nobody knows yet how many came.
        """
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        device, num_local = topk_idx.device, num_experts // self.group_size
        assert len(topk_idx) <= most
        assert num_experts <= 2048
        assert num_local <= 256
        assert do_expand == do_cpu_sync, "vLLM has these two modes"
        rows, local, weights, sources = self._received(x, topk_idx, topk_weights, num_experts)
        counts = [int((local == expert).sum()) for expert in range(num_local)]
        by_source = torch.bincount(sources[:, 0], minlength=self.group_size)
        handle = SimpleNamespace(
            num_recv_tokens_per_expert_list=counts if do_cpu_sync else [],
            psum_num_recv_tokens_per_scaleup_rank=by_source.cumsum(0).int().to(device),
            do_expand=do_expand,
            num_tokens=len(topk_idx),
            sources=sources,
            order=torch.empty(0, dtype=torch.long),
        )
        ids = None
        if do_expand:
            row, k = torch.nonzero(local >= 0, as_tuple=True)
            by_expert = local[row, k].sort(stable=True).indices
            handle.order = row[by_expert]
            rows = [part[handle.order] for part in rows]
            weights = weights[row, k][by_expert]
        else:
            unused = most * self.group_size - len(local)
            rows = [_longer(part, unused, RUBBISH) for part in rows]
            ids, weights = _longer(local, unused, 0), _longer(weights, unused, RUBBISH)
        received = tuple(part.to(device) for part in rows)
        given = received if isinstance(x, tuple) else received[0]
        return given, None if ids is None else ids.to(device), weights.to(device), handle, _DONE

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        """Unweighted sums."""
        assert topk_weights is None
        assert x.dtype == torch.bfloat16
        reduced = x.cpu()[: len(handle.sources)]
        if handle.do_expand:
            assert len(x) == len(handle.order)
            reduced = torch.zeros(len(handle.sources), x.shape[1])
            reduced.index_add_(0, handle.order, x.cpu().float())
        found = self._returned(reduced.to(x.dtype), handle.sources, handle.num_tokens)
        return found.to(x.device), None, _DONE


def _longer(rows: torch.Tensor, more: int, value: float) -> torch.Tensor:
    return torch.cat([rows, torch.full((more, *rows.shape[1:]), value).to(rows.dtype)])


def install_deep_ep(buffer: type[Buffer] = Buffer) -> None:
    """Make ``deep_ep`` importable; before an engine looks for it."""
    module: Any = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", None)
    module.Buffer, module.Config, module.EventOverlap = buffer, _Sizes, object
    module.ElasticBuffer, module.EPHandle = ElasticBuffer, SimpleNamespace
    sys.modules["deep_ep"] = module
