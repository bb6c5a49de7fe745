"""Balancing as a stage of SGLang's own dispatch.

A layer's dispatcher has hooks around ``dispatch`` and ``combine`` (``BaseDispatcher``). They call
the balancer in the order of the flow: ``route`` before dispatch, ``receive`` between dispatch and
experts, ``experts_done`` before combine, ``computed`` behind it. So no kernel computes with copies
that have not arrived. A megakernel does all of it in one launch, so copies are awaited before.
Verified with 0.5.23.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from ultraep_serve.balance.backend import is_capturing
from ultraep_serve.engines.common.loaded import Flow
from ultraep_serve.engines.common.weights import ExpertWeights

_PREFILL = (ForwardMode.EXTEND, ForwardMode.MIXED)


class PrefillTokens:
    """The tokens of the batch that runs; 0 where it is not prefill, which is never planned.

    Ranks of one attention group run the same batch. With attention data parallelism every rank has
    a batch of its own, of decode or with nothing in it while another one's is prefill: then all
    their numbers count, which SGLang's schedulers gather before they run anything.
    """

    def __init__(self) -> None:
        self.number = 0
        self._gathered = 0

    def gathered(self, _result: None, info: Any, *_: Any, **__: Any) -> None:
        """Keep the number of all ranks' tokens.

        Target: ``MLPSyncBatchInfo.all_gather``, behind which every rank has the same. AFTER. A
        batch itself only tells them where dense layers gather tokens too. Remove when it always
        does.
        """
        self._gathered = sum(info.global_num_tokens)

    @contextmanager
    def running(self, forward_batch: Any) -> Iterator[None]:
        """Count while SGLang runs ``forward_batch``; what it captures or tries out counts 0."""
        self.number = self._of(forward_batch)
        try:
            yield
        finally:
            self.number = 0

    def _of(self, forward_batch: Any) -> int:
        if get_parallel().attn_dp_size > 1:
            return self._gathered if forward_batch.is_extend_in_batch else 0
        return own_prefill_tokens(forward_batch)


def own_prefill_tokens(forward_batch: Any) -> int:
    """Return this rank's tokens; with attention data parallelism others may have more."""
    if forward_batch.forward_mode in _PREFILL:
        return int(forward_batch.extend_num_tokens or 0)
    return 0


class SglangFlow(Flow):
    """``Flow`` of a model whose prefill batches have so many ``tokens``."""

    def __init__(self, tokens: PrefillTokens, *, has_zero_experts: bool = False) -> None:
        """With ``has_zero_experts`` chosen ones that compute nothing come as expert 0, weight 0."""
        super().__init__()
        self.tokens, self.has_zero_experts = tokens, has_zero_experts
        self.not_routed: set[int] = set()  # layers that no prefill has passed
        self.launches: dict[FusedMoE, _Stage] = {}  # of layers that a megakernel computes


def balance_dispatch(weights: ExpertWeights[FusedMoE], layer: int, flow: SglangFlow) -> None:
    """Balance what a layer's dispatcher dispatches; ``layer`` counts them in the order they run."""
    stage, dispatcher = _Stage(weights, layer, flow), weights.layer.dispatcher
    dispatcher.register_pre_dispatch_hook(stage.route)
    dispatcher.register_post_dispatch_hook(stage.receive)
    dispatcher.register_pre_combine_hook(stage.experts_done)
    dispatcher.register_post_combine_hook(stage.computed)
    flow.not_routed.add(layer)


def balance_launches(weights: ExpertWeights[FusedMoE], layer: int, flow: SglangFlow) -> None:
    """As ``balance_dispatch``, where a megakernel computes the layer."""
    flow.launches[weights.layer] = _Stage(weights, layer, flow)
    flow.not_routed.add(layer)


class _Stage:
    """The hooks of one layer's dispatcher; what they return, if not None, replaces what goes on."""

    def __init__(self, weights: ExpertWeights[FusedMoE], layer: int, flow: SglangFlow) -> None:
        self._weights, self._layer, self._flow = weights, layer, flow

    def route(
        self, _: BaseDispatcher, hidden_states: torch.Tensor, topk_output: Any
    ) -> tuple[torch.Tensor, Any] | None:
        """Give physical ids to everything behind routing.

        SGLang's recorder has counted the router's own choice by then.
        """
        if self._flow.balancer is None:
            return None
        assert TopKOutputChecker.format_is_standard(topk_output), type(topk_output)
        physical = self._physical(topk_output.topk_ids, topk_output.topk_weights)
        return hidden_states, topk_output._replace(topk_ids=physical)

    def _physical(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Physical ids of a batch; what is captured in a CUDA graph takes the identity.

        It serves all batches that replay it.
        """
        flow = self._flow
        if flow.balancer is None:
            return ids
        tokens = 0 if is_capturing(ids) else flow.tokens.number
        if tokens:
            flow.not_routed.discard(self._layer)
        if tokens and flow.has_zero_experts:
            ids = ids.masked_fill(weights == 0, -1)
        return flow.balancer.route(self._layer, ids, tokens).to(ids.dtype)

    def launch(
        self,
        original: Callable[..., torch.Tensor],
        layer: FusedMoE,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        **named: Any,
    ) -> torch.Tensor:
        """Balance what a megakernel computes by ``original``; a rank without tokens has no ids."""
        if topk_ids is None or topk_weights is None:
            topk_ids = hidden_states.new_empty((0, layer.top_k), dtype=torch.int32)
            topk_weights = hidden_states.new_empty((0, layer.top_k), dtype=torch.float32)
        physical = self._physical(topk_ids, topk_weights)
        self.receive()
        output = original(layer, hidden_states, physical, topk_weights, **named)
        self.experts_done()
        self.computed()
        return output

    def receive(self, *_: Any) -> None:
        """Have copies arrive, and SGLang's kernel find them in the layer."""
        self._weights.show_slots()
        self._flow.receive()

    def experts_done(self, *_: Any) -> None:
        self._flow.experts_done()
        self._weights.masters_alone()

    def computed(self, *_: Any) -> None:
        self._flow.computed()
