"""The MoE layers of a model that SGLang has loaded, on CPU or GPU: balanced together.

SGLang's dispatch and kernels know physical experts already: of global ids, rank r owns
``num_local_experts`` from ``r * num_local_experts`` on, which with L + S of them is
``rank * (L + S) + local``. They are set to these numbers, and nothing of theirs is replaced; hooks
of the dispatcher balance (``stage``). On CPU dispatcher and experts are of ours (``host``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch, set_is_extend_in_batch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE, create_moe_dispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatcher
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import (
    filter_moe_weight_param_global_expert,
    get_deepep_mode,
    get_moe_a2a_backend,
)
from sglang.srt.runtime_context import get_parallel, get_schedule
from sglang.srt.utils import is_cpu
from torch import nn

from ultraep_serve.balance.agreement import unanimous
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.group import BalancedLayers, start_balancing
from ultraep_serve.engines.common.loaded import (
    EngineRank,
    Execution,
    LoadedLayers,
    require_one_number,
    summed,
)
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.engines.sglang.checks import (
    check_cpu_balancing,
    check_device_execution,
    check_layer,
)
from ultraep_serve.engines.sglang.host import HostDispatcher
from ultraep_serve.engines.sglang.mega_moe import MegaMoe
from ultraep_serve.engines.sglang.quantised import shared_values
from ultraep_serve.engines.sglang.stage import PrefillTokens, SglangFlow, balance_dispatch
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import ExpertShape, TokenView


def balance(
    config: BalanceConfig, model: nn.Module, tokens: PrefillTokens
) -> tuple[BalancedLayers, SglangFlow]:
    """Balance ``model``'s layers, whose weights are final; all ranks together.

    Raises UnsupportedError, with which SGLang can serve them without balancing, and what
    ``start_balancing`` raises.
    """
    parallel = get_parallel()
    ranks, world = parallel.moe_ep_group, parallel.world_group.cpu_group
    group = EngineGroup(ranks.cpu_group, ranks.device_group, world.get_group_store())
    with unanimous(group, config):
        loaded = _described(config, model)
    # Models with zero experts (LongCat) send their assignments to expert 0, with weight 0.
    zero_experts = bool(getattr(getattr(model, "config", None), "zero_expert_num", 0))
    flow = SglangFlow(tokens, has_zero_experts=zero_experts)
    own = EngineRank("sglang", loaded.weights[0].layer.moe_ep_rank, group)
    is_mega = get_moe_a2a_backend().is_megamoe()
    execution = MegaMoe(model, flow) if is_mega else _Layers(config, flow, group)
    return start_balancing(config, execution, loaded, own, flow), flow


def _described(config: BalanceConfig, model: nn.Module) -> LoadedLayers[FusedMoE]:
    """What can be balanced as it is. Raises UnsupportedError for anything else."""
    layers = moe_layers(model)
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts in SGLang's FusedMoE layers, which alone "
            "can be balanced"
        )
    check = check_cpu_balancing if is_cpu() else check_device_execution
    for layer in layers:
        check_layer(layer)
        check(layer)
    require_one_number([layer.num_experts for layer in layers])
    first = layers[0]
    return LoadedLayers(
        weights=[ExpertWeights(layer, movable_parameters(layer)) for layer in layers],
        shared=[shared_values(layer) for layer in layers],
        shape=ExpertShape(first.moe_ep_size, first.num_experts, config.slots),
        view=_view_of(first),
        experts_per_token=first.top_k,
        hidden_size=first.hidden_size,
        dtype=first.params_dtype,
        largest_batch=largest_batch(),
    )


class _Layers(Execution[FusedMoE]):
    """``Execution`` by SGLang's kernels, or by what is ours on CPU."""

    def __init__(self, config: BalanceConfig, flow: SglangFlow, group: EngineGroup) -> None:
        self._config, self._flow, self._group = config, flow, group

    def kernel(self, layer: FusedMoE) -> object:
        return layer.dispatcher

    def compute(
        self, layer: FusedMoE, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """See ``Execution.compute``, as in a prefill; DeepEP's buffer limits the tokens at once."""
        weights, ids = topk_weights.to(x.device), physical.to(x.device)
        most, outputs = _most_tokens(x.shape[0]), []
        parts = (torch.split(part, most) for part in (x, weights, ids))
        with torch.inference_mode(), self._flow.unbalanced(), _in_prefill():
            for some, of_some, chosen in zip(*parts, strict=True):
                topk_output = StandardTopKOutput(of_some, chosen, router_logits=of_some)
                outputs.append(layer.forward_impl(some, topk_output))
        output = torch.cat(outputs)
        # Ranks that have all tokens add their parts up, unless SGLang's layers do so themselves
        # (``FusedMoE.forward_impl``, with ``reduce_results``). A dispatcher brings every rank the
        # whole output of its own tokens.
        if _view_of(layer) is TokenView.OWN or layer.reduce_results:
            return output
        return summed(output, self._group.on_host if is_cpu() else self._group.on_device)

    def give_slots(self, layers: Sequence[ExpertWeights[FusedMoE]], shape: ExpertShape) -> None:
        """See ``Execution``.

        Runners read the numbers of experts from the layer's ``moe_runner_config``, which all its
        parts share, and SGLang changes it in place where a layer's experts change
        (``bind_full_expert_weights``). Dispatchers copy them when they are made, so they are made
        anew, as SGLang makes them; DeepEP's buffer is made for their number at the first dispatch,
        after all layers are set. Loading still sees the masters alone, so that weights can be
        loaded in place. Verified with 0.5.23.
        """
        for index, weights in enumerate(layers):
            self._resize(weights.layer, shape.num_local)
            balance_dispatch(weights, index, self._flow)

    def take_slots(self, layers: Sequence[ExpertWeights[FusedMoE]], shape: ExpertShape) -> None:
        for weights in layers:
            self._resize(weights.layer, shape.num_masters)

    def _resize(self, layer: FusedMoE, num_local: int) -> None:
        config, quant_config = layer.moe_runner_config, layer.dispatcher.quant_config
        config.num_experts, config.num_local_experts = num_local * layer.moe_ep_size, num_local
        layer.num_local_experts = num_local
        layer.dispatcher = new_dispatcher(layer, self._config.least_tokens)
        if quant_config:
            layer.dispatcher.set_quant_config(quant_config)
        if hasattr(layer, "_cutlass_swiglu_params"):
            _resize_activation(layer)


def new_dispatcher(layer: FusedMoE, min_batch_tokens: int) -> Any:
    """A dispatcher for ``layer`` as it is configured now; on CPU one of ours."""
    if is_cpu():
        return HostDispatcher(layer.moe_runner_config, min_batch_tokens)
    return create_moe_dispatcher(layer.moe_runner_config, layer.quant_method)


def _resize_activation(layer: FusedMoE) -> None:
    """Give FlashInfer's kernel its parameters of the activation for as many experts as there are.

    They are the same for all experts; SGLang makes them when it has loaded a layer
    (``UnquantizedFusedMoEMethod.process_weights_after_loading``).
    """
    from sglang.srt.layers.moe.moe_runner.flashinfer_cutlass import (
        materialize_swiglu_params_for_cutlass,
    )

    layer._cutlass_swiglu_params = materialize_swiglu_params_for_cutlass(
        layer.moe_runner_config, layer.num_local_experts, layer.w13_weight.device
    )


def _most_tokens(num_tokens: int) -> int:
    """How many of ``num_tokens`` tokens of a rank SGLang dispatches at once in a prefill."""
    if not get_moe_a2a_backend().is_deepep():
        return num_tokens
    if not get_deepep_mode().resolve(is_extend_in_batch=True).is_low_latency():
        return num_tokens
    return min(num_tokens, int(envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()))


@contextmanager
def _in_prefill() -> Iterator[None]:
    """DeepEP's dispatcher asks for the phase; SGLang's own warm-ups tell it the same way."""
    before = get_is_extend_in_batch()
    set_is_extend_in_batch(True)
    try:
        yield
    finally:
        set_is_extend_in_batch(before)


def largest_batch() -> int | None:
    """Tokens over all ranks that SGLang prefills at once at most; None: it has no such bound."""
    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    if not chunk or chunk < 0 or schedule.enable_mixed_chunk:  # which adds tokens of decode
        return None
    return int(chunk * get_parallel().attn_dp_size)


def _view_of(layer: FusedMoE) -> TokenView:
    """Return whose tokens the ranks of ``layer`` see.

    Without a dispatcher of its own every rank has all tokens, with attention data parallelism too:
    SGLang gathers them before the layer. A megakernel dispatches itself.
    """
    is_mega = get_moe_a2a_backend().is_megamoe()
    shared = isinstance(layer.dispatcher, StandardDispatcher) and not is_mega
    return TokenView.SHARED if shared else TokenView.OWN


def complete_outputs(model: nn.Module) -> None:
    """Have models of SGLang's Transformers backend add up what expert-parallel ranks compute.

    Where a model has shared experts, whose output is complete on every rank, the backend leaves the
    sum of the routed ones to a step that only tensor parallelism takes
    (``TransformersFusedMoE.maybe_all_reduce_tensor_model_parallel``). Verified with 0.5.23.
    """
    for module in model.modules():
        if type(module).__name__ == "TransformersFusedMoE":
            layer: Any = module.experts
            if layer.moe_ep_size > 1 and type(layer.dispatcher) is StandardDispatcher:
                layer.reduce_results = True


def expert_layers(model: nn.Module) -> list[FusedMoE]:
    """Find layers spread over the expert-parallel ranks; replicated ones have nothing to move."""
    found = [module for module in model.modules() if isinstance(module, FusedMoE)]
    return [layer for layer in found if layer.moe_ep_size > 1]


def moe_layers(model: nn.Module) -> list[FusedMoE]:
    """MoE layers to balance, in the order they run; draft layers stay as they are."""
    layers = [layer for layer in expert_layers(model) if not layer.is_draft]
    return sorted(layers, key=lambda layer: layer.layer_id)


def movable_parameters(layer: FusedMoE) -> list[nn.Parameter]:
    """All parameters that make up ``layer``'s experts, by SGLang's own rule for moving them.

    Raises UnsupportedError for another tensor with one entry per expert: it would be left behind
    when the expert is copied.
    """
    num_local = layer.num_local_experts
    movable = {
        parameter.data_ptr()
        for name, parameter in layer.named_parameters()
        if filter_moe_weight_param_global_expert(name, parameter, num_local)
    }
    per_expert = [
        *layer.named_per_expert_tensors(num_local),
        *((name, own) for name, own in layer.named_parameters() if own.shape[:1] == (num_local,)),
    ]
    for name, tensor in per_expert:
        if tensor.data_ptr() not in movable:
            raise UnsupportedError(
                f"{layer.layer_name}: expert tensor {name} {tuple(tensor.shape)} cannot be moved; "
                "start the server anew"
            )
    return [parameter for parameter in layer.parameters() if parameter.data_ptr() in movable]
