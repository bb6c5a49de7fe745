"""The MoE layers of a model that vLLM has loaded, on CPU or GPU: balanced together.

Layers stay as vLLM made them; each gets a second kernel, over masters and slots (``kernel``), whose
stage that dispatches is wrapped (``stage``).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group, get_pp_group, get_world_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.platforms import current_platform

from ultraep_serve.balance.agreement import unanimous
from ultraep_serve.balance.backend import CONNECT_FACTOR
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
from ultraep_serve.engines.common.run import refuse_or_serve_plainly
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.engines.vllm import checks, layer_checks
from ultraep_serve.engines.vllm.expert_tensors import (
    expert_parameters,
    is_as_in_checkpoint,
    shared_values,
)
from ultraep_serve.engines.vllm.host import put_in_kernels
from ultraep_serve.engines.vllm.kernel import plain_stage, with_slots
from ultraep_serve.engines.vllm.mega_moe import balance_mega_moe, mega_moe_layers
from ultraep_serve.engines.vllm.new_weights import refuse_new_weights
from ultraep_serve.engines.vllm.stage import VllmFlow
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.system.topology import ONLY_STAGE, PipelineStage
from ultraep_serve.types import ExpertShape, Policy, TokenView

logger = init_logger("vllm.ultraep_serve")


def take_over(config: BalanceConfig, worker: Any, vllm_config: VllmConfig) -> None:
    """Balance the MoE layers of ``worker``'s model; those of a draft model stay at home.

    On CPU all of them get kernels of ours, balanced or not. Raises UnsupportedError for what cannot
    be balanced, unless it is to be served plainly.
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
        layers = [runner.routed_experts for runner in balanced]
        layers = layers or mega_moe_layers(worker.get_model())
        if not layers:
            raise checks.without_experts(vllm_config)
        drafts = [runner.routed_experts for runner in runners if runner not in in_model]
        made = balance(config, vllm_config, layers, drafts, _cache_bytes(worker))
        if made.copies_stay or not all(map(is_as_in_checkpoint, layers)):
            refuse_new_weights(worker.get_model(), layers)
        made.mark_ready(logger)
        _around(worker.model_runner, "execute_model", before=made.require_in_place)
        _around(worker, "compile_or_warm_up_model", after=lambda: made.end_loading(logger))
    except UnsupportedError as error:
        is_primary = checks.is_primary(vllm_config)
        refuse_or_serve_plainly(error, config, logger, is_primary=is_primary)


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
    refuse_new_weights(worker.get_model(), layers)


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


def balance(
    config: BalanceConfig,
    vllm_config: VllmConfig,
    layers: Sequence[RoutedExperts],
    drafts: Sequence[RoutedExperts] = (),
    cache_bytes: int = 0,
) -> BalancedLayers:
    """Balance ``layers``, whose weights are final, in the order they run; all ranks together.

    ``drafts`` are a draft model's; ``cache_bytes`` vLLM has yet to take for keys and values. On CPU
    they have kernels of ours by now. Raises UnsupportedError, with which vLLM can serve them
    without balancing, and what ``start_balancing`` raises.
    """
    ranks, world = get_ep_group(), get_world_group()
    group = EngineGroup(ranks.cpu_group, ranks.device_group, world.cpu_group.get_group_store())
    own = EngineRank("vllm", ranks.rank_in_group, group, _pipeline_of(vllm_config), cache_bytes)
    if mega_moe_layers(layers[0]):
        return balance_mega_moe(config, vllm_config, layers, own)
    moe = layers[0].moe_config
    have_own = moe.dp_size > 1 or moe.is_sequence_parallel
    view = TokenView.OWN if have_own else TokenView.SHARED
    with unanimous(group, config):
        loaded = _described(config, vllm_config, layers, view)
    flow = VllmFlow(view, moe.sp_size if moe.dp_size == 1 else 0)
    execution = _Layers(vllm_config, flow, group, [*layers, *drafts])
    return start_balancing(config, execution, loaded, own, flow)


def _described(
    config: BalanceConfig, vllm_config: VllmConfig, layers: Sequence[RoutedExperts], view: TokenView
) -> LoadedLayers[RoutedExperts]:
    """What can be balanced as it is. Raises UnsupportedError for anything else."""
    require_one_number([layer.global_num_experts for layer in layers])
    for layer in layers:
        layer_checks.check_layer(layer)
        if not current_platform.is_cpu():
            layer_checks.check_device_execution(layer, config.slots)
    first, parameters = layers[0], [expert_parameters(layer) for layer in layers]
    parallel, moe = vllm_config.parallel_config, first.moe_config
    return LoadedLayers(
        weights=list(map(ExpertWeights, layers, parameters)),
        shared=list(map(shared_values, layers, parameters)),
        shape=ExpertShape(
            moe.ep_size,
            first.global_num_experts,
            config.slots,
            int(parallel.num_ubatches) if parallel.use_ubatching else 1,
        ),
        view=view,
        experts_per_token=first.top_k,
        hidden_size=moe.hidden_dim_unpadded,
        dtype=moe.in_dtype,
        largest_batch=checks.largest_batch(vllm_config),
    )


class _Layers(Execution[RoutedExperts]):
    """``Execution`` by vLLM's kernels, or by those that are ours on CPU."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        flow: VllmFlow,
        group: EngineGroup,
        every: Sequence[RoutedExperts],
    ) -> None:
        """``every`` MoE layer of the process, balanced or not."""
        self._vllm_config, self._flow, self._group = vllm_config, flow, group
        self._every = every
        self._plain: dict[RoutedExperts, Any] = {}  # vLLM's own kernels of layers

    def kernel(self, layer: RoutedExperts) -> object:
        return layer.quant_method.moe_kernel

    def compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        """See ``Execution.compute``; vLLM's buffers hold as many tokens as it schedules at once.

        Where weights are wider than the model, for a dispatch or a kernel, it pads tokens with
        zeros; behind them weights hold what was in memory.
        """
        method, width = layer.quant_method, x.shape[1]
        if not method.skip_forward_padding:
            x = F.pad(x, (0, layer.hidden_size - width))
        weights = topk_weights.to(x.device)
        ids = physical.to(x.device, method.topk_indices_dtype or torch.int32)
        parts = (torch.split(part, layer.moe_config.max_num_tokens) for part in (x, weights, ids))
        outputs = []
        with torch.inference_mode(), self._flow.unbalanced():
            for part in zip(*parts, strict=True):
                with self._batch(layer, part[0].shape[0]):
                    outputs.append(layer.forward_modular(*part))
        output = torch.cat(outputs)[:, :width]
        # Ranks that have all tokens compute a part of the sum each, which vLLM adds up behind the
        # layer unless the kernel has (``MoERunner._maybe_reduce_final_output``).
        if layer.moe_config.dp_size > 1 or method.moe_kernel.output_is_reduced():
            return output
        return summed(output, self._group.on_device)

    def give_slots(
        self, layers: Sequence[ExpertWeights[RoutedExperts]], shape: ExpertShape
    ) -> None:
        for index, weights in enumerate(layers):
            method = weights.layer.quant_method
            kernel = with_slots(weights, index, shape, self._flow)
            self._plain[weights.layer], method.moe_kernel = method.moe_kernel, kernel

    def take_slots(
        self, layers: Sequence[ExpertWeights[RoutedExperts]], shape: ExpertShape
    ) -> None:
        made = []
        for layer, plain in self._plain.items():
            made.append(layer.quant_method.moe_kernel)
            layer.quant_method.moe_kernel = plain
            if current_platform.is_cpu():
                plain_stage(layer).num_local = shape.num_masters
        self._give_up(made)

    def keep_slots(self) -> None:
        self._give_up(self._plain.values())

    def _give_up(self, kernels: Iterable[Any]) -> None:
        """Destroy what only ``kernels`` dispatch through, which vLLM leaves to us.

        DeepEP's buffers are made for a number of experts, and shared by layers that have as many.
        """
        in_use = _buffers(layer.quant_method.moe_kernel for layer in self._every)
        for identity, buffer in _buffers(kernels).items():
            if identity not in in_use:
                buffer.destroy()
        self._plain = {}

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


def _buffers(kernels: Iterable[Any]) -> dict[int, Any]:
    """What ``kernels`` dispatch through, by identity."""
    stages = [kernel.prepare_finalize for kernel in kernels if kernel is not None]
    return {id(stage.buffer): stage.buffer for stage in stages if hasattr(stage, "buffer")}


def _cache_bytes(worker: Any) -> int:
    """What a worker on a CPU has yet to take for keys and values; see its own reckoning.

    It is a number, or what the worker may take in all (``--gpu-memory-utilization``) and has not.
    """
    if not current_platform.is_cpu():
        return 0
    given = worker.cache_config.kv_cache_memory_bytes
    if given is not None:
        return int(given)
    held: int = psutil.Process().memory_info().rss
    return max(0, int(worker.requested_cpu_memory) - held)


def _pipeline_of(vllm_config: VllmConfig) -> PipelineStage:
    """Return this rank's pipeline stage; vLLM's expert-parallel groups lie within one."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return ONLY_STAGE
    run = int.from_bytes(blake2b(vllm_config.instance_id.encode(), digest_size=8).digest()) >> 2
    return PipelineStage(get_pp_group().rank_in_group, size, run)
