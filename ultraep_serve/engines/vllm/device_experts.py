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
from ultraep_serve.engines.common.execution import Execution, compute_in_parts
from ultraep_serve.engines.vllm.checks import check_device_execution
from ultraep_serve.engines.vllm.expert_tensors import fit_shared_values

__all__ = ["DeviceExperts"]


class DeviceExperts(Execution[RoutedExperts]):
    """``Execution`` where vLLM's kernels run."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches overlap: vLLM's dual batch overlap routes one ahead."""
        parallel = self._vllm_config.parallel_config
        return int(parallel.num_ubatches) if parallel.use_ubatching else 1

    def check(self, layer: RoutedExperts) -> None:
        check_device_execution(layer, self._vllm_config)

    def take_over(self, layers: Sequence[RoutedExperts]) -> None:
        """Do nothing: vLLM's kernels are in place."""

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Return logical ids, which vLLM takes without balancing."""
        return topk_ids

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Execution.compute``; vLLM's buffers hold as many tokens as it schedules at once."""

        def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            with self._batch(layer, x.shape[0]):
                output: torch.Tensor = RoutedExperts.forward_modular(layer, x, weights, ids)
            return output

        weights = topk_weights.to(x.device)
        ids = physical.to(x.device, layer.quant_method.topk_indices_dtype or torch.int32)
        return compute_in_parts(compute, layer.moe_config.max_num_tokens, x, weights, ids)

    def resize(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        """See ``Execution.resize``.

        The expert map comes from vLLM's own ``update_expert_map``. Kernel and dispatch are made
        anew from what the kernel was made of, as vLLM's elastic expert parallelism does
        (``fused_moe.eep_reconfigure``): weights are in the kernel's order already. The layer's
        configuration is changed in place because its runner and its kernels share it. DeepEP's
        buffers are made for a number of experts, and vLLM leaves it to their user to destroy them.
        Verified with 0.32 and 0.33.
        """
        old_buffers = _buffers(layers)
        for layer, own in zip(layers, parameters, strict=True):
            moe = layer.moe_config
            moe.num_experts, moe.num_local_experts = after * moe.ep_size, after
            layer.global_num_experts = moe.num_experts
            layer.update_expert_map()
            if after < before:  # kernels combine scales when made, while ``own`` have masters alone
                fit_shared_values(layer, own, before, after)
            layer.quant_method.moe_kernel = _kernel_for(layer)
            if after > before:
                fit_shared_values(layer, own, before, after)
        for identity in old_buffers.keys() - _buffers(layers).keys():
            old_buffers[identity].destroy()

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
    """Experts that say when they are launched, between vLLM's dispatch and its combine."""

    @expert_clock
    def apply(self, *args: Any, **named: Any) -> Any:
        """Call vLLM's own."""
        return super().apply(*args, **named)


@functools.cache
def _timed(kind: type) -> type:
    """Time the launches of ``kind``; kernels that also route or combine stay as they are."""
    if issubclass(kind, _TimedExperts) or not issubclass(kind, mk.FusedMoEExpertsModular):
        return kind
    return type(kind.__name__, (_TimedExperts, kind), {})


def _buffers(layers: Sequence[RoutedExperts]) -> dict[int, Any]:
    """What the kernels of ``layers`` dispatch through, by identity; layers share it."""
    stages = [layer.quant_method.moe_kernel.prepare_finalize for layer in layers]
    found = [stage.buffer for stage in stages if hasattr(stage, "buffer")]
    return {id(buffer): buffer for buffer in found}
