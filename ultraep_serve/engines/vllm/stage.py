"""Balancing as a stage of vLLM's own dispatch.

vLLM's kernel of a layer has a stage around its experts (``FusedMoEPrepareAndFinalizeModular``):
``prepare`` dispatches tokens, ``finalize`` combines what experts gave. ``BalancedStage`` wraps the
stage that a kernel has, whichever that is, and calls the balancer in the order of the flow:
``route`` before dispatch, ``receive`` between dispatch and experts, ``experts_done`` before
combine; ``computed`` follows when the kernel is done (``kernel``). So no kernel computes with
copies that have not arrived. Verified with 0.32 and 0.33.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.forward_context import get_forward_context
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from ultraep_serve.balance.backend import is_capturing
from ultraep_serve.engines.common.loaded import Flow
from ultraep_serve.types import TokenView

Prepared: TypeAlias = tuple[Any, Any, Any, torch.Tensor | None, torch.Tensor | None]


class VllmFlow(Flow):
    """``Flow`` of batches that vLLM may have cut in two."""

    def __init__(self, view: TokenView, shards: int = 0) -> None:
        """``shards``: ranks that have equal parts of one batch, of an engine that is alone."""
        super().__init__()
        self._view, self._shards = view, shards

    def route(self, layer: int, ids: torch.Tensor) -> torch.Tensor:
        """Physical ids for logical ``ids`` (T, K), of the same type."""
        if self.balancer is None:
            return ids
        tokens = self._batch_tokens(ids)
        return self.balancer.route(layer, ids, tokens, self.micro_batch()).to(ids.dtype)

    def micro_batch(self) -> int:
        return int(dbo_current_ubatch_id())

    def _batch_tokens(self, ids: torch.Tensor) -> int:
        """Tokens of this (micro-)batch over all ranks, padding included, the same on every rank.

        CUDA graphs are captured for the sizes of decode, once for all batches that replay them, so
        they count as empty. Ranks replay together: vLLM has them agree on it for every batch.
        """
        if is_capturing(ids):
            return 0
        if self._view is TokenView.SHARED:
            return ids.shape[0]
        metadata = get_forward_context().dp_metadata
        if metadata is None:
            return ids.shape[0] * self._shards
        return int(metadata.num_tokens_across_dp_cpu.sum())


def _of_wrapped(name: str) -> Callable[..., Any]:
    """A method of ``BalancedStage`` that asks the wrapped stage."""

    def ask(stage: "BalancedStage", *args: Any, **named: Any) -> Any:
        return getattr(stage.wrapped, name)(*args, **named)

    return ask


class BalancedStage(mk.FusedMoEPrepareAndFinalizeModular):
    """The stage of a kernel, with balancing; what it is asked otherwise the wrapped one answers."""

    def __init__(
        self, wrapped: mk.FusedMoEPrepareAndFinalizeModular, layer: int, flow: VllmFlow
    ) -> None:
        """``layer`` counts the model's MoE layers in the order they run."""
        self.wrapped = wrapped
        self._layer, self._flow = layer, flow

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Prepared:
        """Route, dispatch, and have the copies arrive."""
        ids = self._flow.route(self._layer, topk_ids)
        prepared = self.wrapped.prepare(a1, topk_weights, ids, *rest, **named)
        return self._received(prepared, topk_weights, ids)

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Do as ``prepare``, of which what follows dispatch is done by the receiver."""
        ids = self._flow.route(self._layer, topk_ids)
        dispatched = self.wrapped.prepare_async(a1, topk_weights, ids, *rest, **named)
        hook, receiver = dispatched if isinstance(dispatched, tuple) else (None, dispatched)

        def receive() -> Prepared:
            return self._received(receiver(), topk_weights, ids)

        return receive if hook is None else (hook, receive)

    def _received(self, prepared: Prepared, weights: torch.Tensor, ids: torch.Tensor) -> Prepared:
        """What the kernel gets: physical ``ids`` also where the wrapped stage leaves them to it.

        A kernel that gets none takes those that its caller has, which are logical.
        """
        self._flow.receive()
        *experts_input, sent_ids, sent_weights = prepared
        return (
            *experts_input,
            ids if sent_ids is None else sent_ids,
            weights if sent_weights is None else sent_weights,
        )

    def finalize(self, *args: Any, **named: Any) -> None:
        self._flow.experts_done()
        self.wrapped.finalize(*args, **named)

    def finalize_async(self, *args: Any, **named: Any) -> Any:
        """Do as ``finalize``, of which the receiver does the end."""
        self._flow.experts_done()
        return self.wrapped.finalize_async(*args, **named)

    def supports_deferred_moe_finalize(self) -> bool:
        """Say no: nobody would say then that the layer has been computed."""
        return False

    @property
    def activation_format(self) -> Any:
        return self.wrapped.activation_format

    # which vLLM's class has too
    post_init_setup = _of_wrapped("post_init_setup")
    allocate_fused_expert_output = _of_wrapped("allocate_fused_expert_output")
    topk_indices_dtype = _of_wrapped("topk_indices_dtype")
    max_num_tokens_per_rank = _of_wrapped("max_num_tokens_per_rank")
    num_dispatchers = _of_wrapped("num_dispatchers")
    output_is_reduced = _of_wrapped("output_is_reduced")
    supports_async = _of_wrapped("supports_async")
    supports_dbo = _of_wrapped("supports_dbo")  # since 0.33
