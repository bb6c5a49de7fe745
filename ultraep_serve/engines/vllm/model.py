"""The MoE layers of a model that vLLM has loaded, on CPU or GPU: balanced together.

vLLM's kernels on GPUs know physical experts already: global ids, this rank's part of which is given
by an expert map, so many local experts as the weights have rows. They are set to R * (L + S)
experts instead of E and of L + S local ones, which its linear placement maps to
``rank * (L + S) + local``, and are built anew for these numbers. Nothing of theirs is replaced but
the stage that dispatches, which is wrapped (``stage``). On CPU kernels are of ours (``host``).
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import VllmConfig
from vllm.distributed import get_dp_group, get_ep_group, get_pp_group, get_tp_group, get_world_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from ultraep_serve.balance.backend import CONNECT_FACTOR
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.group import (
    BalancedLayers,
    EngineRank,
    Execution,
    LoadedLayers,
    require_one_number,
    start_balancing,
    summed,
)
from ultraep_serve.engines.common.run import refuse_or_serve_plainly
from ultraep_serve.engines.vllm.checks import (
    check_device_execution,
    check_layer,
    is_primary,
    without_experts,
)
from ultraep_serve.engines.vllm.expert_tensors import (
    expert_parameters,
    fit_shared_values,
    shared_values,
)
from ultraep_serve.engines.vllm.host import put_in_kernels
from ultraep_serve.engines.vllm.stage import BalancedStage, Flow
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.topology import ONLY_STAGE, PipelineStage
from ultraep_serve.types import ExpertShape, Policy, TokenView

__all__ = ["balance", "take_over"]

logger = init_logger("vllm.ultraep_serve")

_NEW_WEIGHTS = ("reload_weights", "start_weight_update", "start_draft_weight_update")


def take_over(config: BalanceConfig, worker: Any, vllm_config: VllmConfig) -> None:
    """Balance the MoE layers of ``worker``'s model; those of a draft model stay at home.

    On CPU all of them get kernels of ours, balanced or not. A ``worker`` whose experts were taken
    over refuses other weights, before it touches those it has. Raises UnsupportedError for what
    cannot be balanced, unless it is to be served plainly.
    """
    compilation = vllm_config.compilation_config
    registered = map(compilation.static_forward_context.get, compilation.static_all_moe_layers)
    runners = [runner for runner in registered if isinstance(runner, MoERunner)]
    in_model = set(worker.get_model().modules())
    balanced = [runner for runner in runners if runner in in_model]
    if current_platform.is_cpu():
        shared_out = [runner for runner in runners if runner.routed_experts.use_ep]
        _compute_on_host(config, worker, shared_out)
    if config.policy is Policy.OFF:
        return
    try:
        if not balanced:
            raise without_experts(vllm_config)
        _balance(config, worker, vllm_config, balanced)
    except UnsupportedError as error:
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary(vllm_config))


def _compute_on_host(config: BalanceConfig, worker: Any, runners: list[MoERunner]) -> None:
    """Have the experts of ``runners`` computed by kernels of ours, which cannot be traced.

    vLLM compiles models on CPU through its MoE layers; on GPUs an operator of its own keeps them
    out, which does so here too.
    """
    if not runners:
        return
    layers = [runner.routed_experts for runner in runners]
    put_in_kernels(layers, config.timeout_seconds * CONNECT_FACTOR)
    for runner in runners:
        alone = runner.shared_experts is None
        operators = torch.ops.vllm
        runner._forward_entry = operators.moe_forward if alone else operators.moe_forward_shared
    _refuse_new_weights(worker)


def _balance(
    config: BalanceConfig, worker: Any, vllm_config: VllmConfig, runners: list[MoERunner]
) -> None:
    layers = [runner.routed_experts for runner in runners]
    zero_experts = any(isinstance(runner.router, ZeroExpertRouter) for runner in runners)
    balanced = balance(config, vllm_config, layers, has_zero_experts=zero_experts)
    balanced.mark_ready(logger)
    if not current_platform.is_cpu():  # where they have been refused by now
        _refuse_new_weights(worker)
    _around(worker.model_runner, "execute_model", before=balanced.require_in_place)
    _around(worker, "compile_or_warm_up_model", after=lambda: balanced.end_loading(logger))


def _around(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Call ``before`` and ``after`` around each call of one object's method.

    ``execute_model`` runs every batch of requests. ``compile_or_warm_up_model`` runs dummy batches
    of many sizes, tunes kernels and captures graphs; vLLM takes requests when all workers have
    returned from it.
    """
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        before()
        done = method(*args, **named)
        after()
        return done

    setattr(owner, name, call)


def _refuse_new_weights(worker: Any) -> None:
    def refuse() -> None:
        raise UnsupportedError(
            "experts stay where balancing and kernels on CPU have put them, so weights cannot be "
            "replaced in a running server, which serves on with those it has; restart it with the "
            "new ones, or serve without the setting 'ultraep'"
        )

    for name in _NEW_WEIGHTS:
        if hasattr(worker, name):
            _around(worker, name, before=refuse)


def balance(
    config: BalanceConfig,
    vllm_config: VllmConfig,
    layers: Sequence[RoutedExperts],
    *,
    has_zero_experts: bool = False,
) -> BalancedLayers:
    """Balance ``layers``, whose weights are final, in the order they run; all ranks together.

    On CPU they have kernels of ours by now. Raises UnsupportedError, with which vLLM can serve them
    without balancing, and what ``start_balancing`` raises.
    """
    require_one_number([layer.global_num_experts for layer in layers])
    for layer in layers:
        check_layer(layer)
        if not current_platform.is_cpu():
            check_device_execution(layer, vllm_config)
    first, parameters = layers[0], [expert_parameters(layer) for layer in layers]
    parallel, moe = vllm_config.parallel_config, first.moe_config
    view = TokenView.OWN if moe.dp_size > 1 else TokenView.SHARED
    flow = Flow(view, has_zero_experts=has_zero_experts)
    loaded = LoadedLayers(
        layers=layers,
        parameters=parameters,
        shared=list(map(shared_values, layers, parameters)),
        shape=ExpertShape(
            moe.ep_size,
            first.global_num_experts,
            config.slots,
            int(parallel.num_ubatches) if parallel.use_ubatching else 1,
        ),
        view=view,
        experts_per_token=first.top_k,
        hidden_size=first.hidden_size,
        dtype=moe.in_dtype,
        largest_batch=_largest_batch(vllm_config) * moe.dp_size,
    )
    ranks, pipeline = get_ep_group(), _pipeline_of(vllm_config)
    world = get_world_group()
    others = [each.cpu_group for each in (world, get_tp_group(), get_dp_group(), get_pp_group())]
    store = world.cpu_group.get_group_store()
    group = EngineGroup(ranks.cpu_group, ranks.device_group, store, others)
    cache = int(vllm_config.cache_config.kv_cache_memory_bytes or 0)
    own = EngineRank("vllm", ranks.rank_in_group, group, pipeline, cache)
    return start_balancing(config, _Layers(vllm_config, flow, group), loaded, own, flow)


class _Layers(Execution[RoutedExperts]):
    """``Execution`` by vLLM's kernels, or by those that are ours on CPU."""

    def __init__(self, vllm_config: VllmConfig, flow: Flow, group: EngineGroup) -> None:
        self._vllm_config, self._flow, self._group = vllm_config, flow, group

    def kernel(self, layer: RoutedExperts) -> object:
        return layer.quant_method.moe_kernel

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Execution.compute``; vLLM's buffers hold as many tokens as it schedules at once."""
        weights = topk_weights.to(x.device)
        ids = physical.to(x.device, layer.quant_method.topk_indices_dtype or torch.int32)
        parts = (torch.split(part, layer.moe_config.max_num_tokens) for part in (x, weights, ids))
        outputs = []
        with torch.inference_mode(), self._flow.left_alone():
            for part in zip(*parts, strict=True):
                with self._batch(layer, part[0].shape[0]):
                    outputs.append(layer.forward_modular(*part))
        output = torch.cat(outputs)
        # Ranks that have all tokens compute a part of the sum each, which vLLM adds up behind the
        # layer unless the kernel has (``MoERunner._maybe_reduce_final_output``).
        if layer.moe_config.dp_size > 1 or layer.quant_method.moe_kernel.output_is_reduced():
            return output
        return summed(output, self._group.on_device)

    def resize(
        self,
        layers: Sequence[RoutedExperts],
        parameters: Sequence[Sequence[torch.nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        """See ``Execution.resize``; with slots, layers have the stage that balances them.

        The expert map comes from vLLM's own ``update_expert_map``. Kernel and dispatch are made
        anew from what the kernel was made of, as vLLM's elastic expert parallelism does
        (``fused_moe.eep_reconfigure``): weights are in the kernel's order already. The layer's
        configuration is changed in place because its runner and its kernels share it. DeepEP's
        buffers are made for a number of experts, and vLLM leaves it to their user to destroy them.
        Verified with 0.32 and 0.33.
        """
        old_buffers = _buffers(layers)
        for index, (layer, own) in enumerate(zip(layers, parameters, strict=True)):
            if after < before:  # kernels combine scales when made, while ``own`` have masters alone
                fit_shared_values(layer, own, before, after)
            if current_platform.is_cpu():
                _stage_of(layer).num_local = after
            else:
                _rebuild(layer, after)
            if after > before:
                fit_shared_values(layer, own, before, after)
            stage: Any = _stage_of(layer)
            if after > before:
                stage = BalancedStage(stage, index, self._flow)
            layer.quant_method.moe_kernel.impl.prepare_finalize = stage
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


def _stage_of(layer: RoutedExperts) -> Any:
    """The stage of ``layer``'s kernel, without balancing."""
    stage = layer.quant_method.moe_kernel.prepare_finalize
    return stage.wrapped if isinstance(stage, BalancedStage) else stage


def _rebuild(layer: RoutedExperts, num_local: int) -> None:
    """Have vLLM's kernel of ``layer`` made for so many experts on this rank."""
    moe = layer.moe_config
    moe.num_experts, moe.num_local_experts = num_local * moe.ep_size, num_local
    layer.global_num_experts = moe.num_experts
    layer.update_expert_map()
    experts = layer.quant_method.moe_kernel.fused_experts
    stage = maybe_make_prepare_finalize(
        moe=moe,
        quant_config=experts.quant_config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
    )
    names = inspect.signature(type(experts)).parameters
    made = type(experts)(
        **{name: getattr(experts, name) for name in names if hasattr(experts, name)}
    )
    for name, value in vars(experts).items():
        if isinstance(value, torch.nn.Parameter):  # of the layer, set once weights were in order
            setattr(made, name, value)
    layer.quant_method.moe_kernel = mk.FusedMoEKernel(stage, made)


def _buffers(layers: Sequence[RoutedExperts]) -> dict[int, Any]:
    """What the kernels of ``layers`` dispatch through, by identity; layers share it."""
    stages = [_stage_of(layer) for layer in layers]
    found = [stage.buffer for stage in stages if hasattr(stage, "buffer")]
    return {id(buffer): buffer for buffer in found}


def _largest_batch(vllm_config: VllmConfig) -> int:
    """Tokens that vLLM schedules at once at most, of each data-parallel rank."""
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    most = int(scheduler.max_num_batched_tokens)
    return most if model is None else min(most, scheduler.max_num_seqs * model.max_model_len)


def _pipeline_of(vllm_config: VllmConfig) -> PipelineStage:
    """Return this rank's pipeline stage; vLLM's expert-parallel groups lie within one."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return ONLY_STAGE
    run = int.from_bytes(blake2b(vllm_config.instance_id.encode(), digest_size=8).digest()) >> 2
    return PipelineStage(get_pp_group().rank_in_group, size, run)
