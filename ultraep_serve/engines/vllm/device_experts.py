"""Expert parallelism on a GPU: vLLM's own dispatch, kernels and combine, with slots added.

vLLM's kernels know physical experts already: global ids, this rank's part of which is given by an
expert map, so many local experts as the weights have rows. They are set to R * (L + S) experts
instead of E and of L + S local ones, which its linear placement maps to ``rank * (L + S) + local``,
and are built anew for these numbers. Nothing of theirs is replaced.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.balance.speeds import expert_clock
from ultraep_serve.engines.common.execution import drop_slots
from ultraep_serve.engines.vllm.checks import check_device_execution
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values
from ultraep_serve.types import ExpertShape

__all__ = ["DeviceExperts"]


class DeviceExperts:
    """What ``ExpertGroup`` asks of the engine where vLLM's kernels run."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config

    @property
    def num_micro_batches(self) -> int:
        """With dual batch overlap vLLM routes the next micro-batch before it computes the first."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.num_ubatches) if parallel.use_ubatching else 1

    def check(self, layer: RoutedExperts) -> None:
        """Raise UnsupportedError, naming the remedy, if ``layer`` cannot be balanced here."""
        check_device_execution(layer, self._vllm_config)

    def give_slots(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Announce the slots to ``layers``; ``parameters`` get the rows for them afterwards."""
        self._tell(layers, shape.num_ranks * shape.num_local, shape.num_local)
        for layer, own in zip(layers, parameters, strict=True):
            fit_shared_values(layer, own, shape.num_masters, shape.num_local)

    def take_slots_back(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        shape: ExpertShape,
    ) -> None:
        """Undo ``give_slots``; masters that have been moved stay where they are now."""
        drop_slots(parameters, shape)
        for layer, own in zip(layers, parameters, strict=True):
            fit_shared_values(layer, own, shape.num_local, shape.num_masters)
        self._tell(layers, shape.num_logical_experts, shape.num_masters)

    def finish(self, layers: Sequence[RoutedExperts]) -> None:
        """Nothing to do: vLLM's kernels are in place."""

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Without balancing vLLM takes logical ids."""
        return topk_ids

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """Output (T, H) for ``x`` (T, H), outside of vLLM's own forward pass: for measuring.

        More tokens than vLLM schedules at once go one batch after another: its buffers hold no
        more.
        """
        moe = layer.moe_config
        ids = physical.to(x.device, layer.quant_method.topk_indices_dtype or torch.int32)
        weights = topk_weights.to(x.device)
        outputs = []
        for start in range(0, x.shape[0], moe.max_num_tokens):
            part = slice(start, start + moe.max_num_tokens)
            with torch.inference_mode(), self._batch(layer, x[part].shape[0]):
                outputs.append(
                    RoutedExperts.forward_modular(layer, x[part], weights[part], ids[part])
                )
        return torch.cat(outputs)

    @staticmethod
    def _tell(layers: Sequence[RoutedExperts], num_experts: int, num_local: int) -> None:
        """Have ``layers`` serve ``num_experts`` experts, ``num_local`` of them here.

        The expert map comes from vLLM's own ``update_expert_map``. Kernel and dispatch are made
        anew from what the kernel was made of, as vLLM's elastic expert parallelism does
        (``fused_moe.eep_reconfigure``): weights are in the kernel's order already. The layer's
        configuration is changed in place because its runner and its kernels share it. DeepEP's
        buffers are made for a number of experts, and vLLM leaves it to their user to destroy them.
        Verified with 0.32 and 0.33.
        """
        before = _buffers(layers)
        for layer in layers:
            moe = layer.moe_config
            moe.num_experts, moe.num_local_experts = num_experts, num_local
            layer.global_num_experts = num_experts
            layer.update_expert_map()
            layer.quant_method.moe_kernel = _kernel_for(layer)
        after = _buffers(layers)
        for identity in before.keys() - after.keys():
            before[identity].destroy()

    @contextmanager
    def _batch(self, layer: RoutedExperts, num_tokens: int) -> Iterator[None]:
        """The forward context of a batch that brings ``num_tokens`` to every rank's layer."""
        moe = layer.moe_config
        of_engine = num_tokens * moe.sp_size
        everywhere = torch.full((moe.dp_size,), of_engine, dtype=torch.int32)
        with set_forward_context(
            None,
            self._vllm_config,
            num_tokens=of_engine,
            num_tokens_across_dp=everywhere if moe.dp_size > 1 else None,
        ):
            metadata = get_forward_context().dp_metadata
            with metadata.sp_local_sizes(moe.sp_size) if metadata else nullcontext():
                yield


def _kernel_for(layer: RoutedExperts) -> mk.FusedMoEKernel:
    """The kernel that ``layer`` has, made for the experts that its configuration now says."""
    experts = layer.quant_method.moe_kernel.fused_experts
    stage = maybe_make_prepare_finalize(
        moe=layer.moe_config,
        quant_config=experts.quant_config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
    )
    kind = _timed(experts.__class__)
    names = inspect.signature(kind).parameters
    made = kind(**{name: getattr(experts, name) for name in names if hasattr(experts, name)})
    for name, value in vars(experts).items():
        if isinstance(value, torch.nn.Parameter):  # of the layer, set once weights were in order
            setattr(made, name, value)
    return mk.FusedMoEKernel(stage, made)


class _TimedExperts(mk.FusedMoEExpertsModular):
    """Says when experts are launched, between vLLM's dispatch and its combine."""

    @expert_clock
    def apply(self, *args: Any, **named: Any) -> Any:
        """vLLM's own."""
        return super().apply(*args, **named)


@functools.cache
def _timed(kind: type) -> type:
    """``kind`` with its launches timed; kernels that also route or combine stay as they are."""
    if issubclass(kind, _TimedExperts) or not issubclass(kind, mk.FusedMoEExpertsModular):
        return kind
    return type(kind.__name__, (_TimedExperts, kind), {})


def _buffers(layers: Sequence[RoutedExperts]) -> dict[int, Any]:
    """What the kernels of ``layers`` dispatch through, by identity; layers share it."""
    stages = [layer.quant_method.moe_kernel.prepare_finalize for layer in layers]
    found = [stage.buffer for stage in stages if hasattr(stage, "buffer")]
    return {id(buffer): buffer for buffer in found}
