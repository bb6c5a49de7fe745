"""The MoE layers of one process, joined into one balancer once all of them are loaded."""

import functools
from collections.abc import Callable
from hashlib import blake2b

import torch
from vllm.config import VllmConfig
from vllm.distributed import (
    get_dp_group,
    get_ep_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
)
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.cuda.recording import is_capturing
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.execution import LoadedLayers, start_balancing, summed
from ultraep_serve.engines.common.rendezvous import refuse_or_serve_plainly
from ultraep_serve.engines.common.setup import BalancedLayers, Batch, EngineRank, require_one_number
from ultraep_serve.engines.vllm.checks import check_layer, is_primary
from ultraep_serve.engines.vllm.cpu_experts import CpuExperts
from ultraep_serve.engines.vllm.device_experts import DeviceExperts
from ultraep_serve.engines.vllm.expert_tensors import expert_parameters, shared_values
from ultraep_serve.engines.vllm.warm_up import after_warm_up
from ultraep_serve.errors import POLICY_OFF, UnsupportedError
from ultraep_serve.system.topology import ONLY_STAGE, PipelineStage
from ultraep_serve.types import ExpertShape, Policy, TokenView

__all__ = ["ExpertGroup"]

logger = init_logger("vllm.ultraep_serve")


class ExpertGroup:
    """All MoE layers of this rank: collects them while they load, then routes and runs them."""

    def __init__(self, config: BalanceConfig, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._config = config
        self._num_expected = 0
        self._layers: list[RoutedExperts] = []  # layers whose weights are final
        self.balanced: BalancedLayers | None = None  # None: still loading, or not balanced
        self._execution: CpuExperts | DeviceExperts = (
            CpuExperts(config) if current_platform.is_cpu() else DeviceExperts(vllm_config)
        )

    def expect_layer(self) -> None:
        """Count one more layer of the model that is being built."""
        self._num_expected += 1

    def add(self, layer: RoutedExperts) -> int:
        """Take a layer whose weights are final, return its index; the last one starts balancing."""
        if len(self._layers) == self._num_expected:
            raise UnsupportedError(
                f"{layer.layer_name} was loaded after the model's own {len(self._layers)} MoE "
                "layers; weights that are loaded anew are not there yet",
                otherwise=POLICY_OFF,
            )
        self._layers.append(layer)
        if len(self._layers) == self._num_expected:
            self._finish_loading()
        return len(self._layers) - 1

    def batch(self, topk_ids: torch.Tensor) -> Batch:
        """The batch that ``topk_ids`` (T, K) are of.

        CUDA graphs are captured for the sizes of decode, once for all batches that replay them, so
        they count as empty. Ranks replay together: vLLM has them agree on it for every batch.
        """
        num_rows = topk_ids.shape[0]
        tokens = 0 if is_capturing(topk_ids.device) else self._batch_tokens(num_rows)
        return Batch(tokens, dbo_current_ubatch_id())

    def plain_ids(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """What vLLM takes for ``topk_ids`` (T, K) where nothing is balanced."""
        return self._execution.plain_ids(topk_ids)

    def compute(
        self, index: int, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """Complete output of layer ``index`` for this rank's tokens ``x`` (T, H); CPU only."""
        return self._execution.compute(self._layers[index], x, topk_weights, physical)

    def computed(self) -> None:
        """Take note that vLLM has finished the layer that was routed last."""
        if self.balanced is not None:
            self.balanced.computed(dbo_current_ubatch_id())

    def _batch_tokens(self, num_rows: int) -> int:
        """Tokens of this (micro-)batch over all ranks, padding included, the same on every rank."""
        if self._view is TokenView.SHARED:
            return num_rows
        metadata = get_forward_context().dp_metadata
        return int(metadata.num_tokens_across_dp_cpu.sum()) if metadata else 0

    @property
    def _view(self) -> TokenView:
        """Whose tokens ranks see: with data parallelism their own, tensor parallel or not."""
        parallel = self._layers[0].moe_config.moe_parallel_config
        return TokenView.OWN if parallel.dp_size > 1 else TokenView.SHARED

    def _finish_loading(self) -> None:
        self._execution.take_over(self._layers)
        if self._config.policy is not Policy.OFF:
            try:
                require_one_number([layer.global_num_experts for layer in self._layers])
                for layer in self._layers:
                    check_layer(layer)
                    self._execution.check(layer)
                self._start_balancing()
            except UnsupportedError as error:
                primary = is_primary(self.vllm_config)
                refuse_or_serve_plainly(error, self._config, logger, is_primary=primary)

    def _start_balancing(self) -> None:
        first, parameters = self._layers[0], [expert_parameters(layer) for layer in self._layers]
        loaded = LoadedLayers(
            layers=self._layers,
            parameters=parameters,
            shared=list(map(shared_values, self._layers, parameters)),
            shape=ExpertShape(
                first.moe_config.ep_size,
                first.global_num_experts,
                self._config.slots,
                self._execution.num_micro_batches,
            ),
            view=self._view,
            experts_per_token=first.top_k,
            hidden_size=first.hidden_size,
            dtype=first.moe_config.in_dtype,
        )
        ranks, pipeline = get_ep_group(), _pipeline_of(self.vllm_config)
        world = get_world_group()
        others = [
            each.cpu_group for each in (world, get_tp_group(), get_dp_group(), get_pp_group())
        ]
        store = world.cpu_group.get_group_store()
        group = EngineGroup(ranks.cpu_group, ranks.device_group, store, others)
        own = EngineRank("vllm", ranks.rank_in_group, group, pipeline)
        complete = _complete(first, loaded.view, group)
        self.balanced = start_balancing(self._config, self._execution, loaded, own, complete)
        self.balanced.mark_ready(logger)
        after_warm_up(self.vllm_config, self._end_loading)

    def _end_loading(self) -> None:
        assert self.balanced is not None, "what is not balanced is not waited for"
        self.balanced.end_loading(logger)


def _complete(
    layer: RoutedExperts, view: TokenView, group: EngineGroup
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the whole output of what an execution computes on a rank.

    On GPUs ranks that have all tokens compute a part of the sum each, which vLLM adds up behind the
    layer unless the kernel has (``MoERunner._maybe_reduce_final_output``).
    """
    is_whole = current_platform.is_cpu() or view is TokenView.OWN
    if is_whole or layer.quant_method.moe_kernel.output_is_reduced():
        return lambda output: output
    return functools.partial(summed, group=group.on_device)


def _pipeline_of(vllm_config: VllmConfig) -> PipelineStage:
    """Return this rank's pipeline stage; vLLM's expert-parallel groups lie within one."""
    size = vllm_config.parallel_config.pipeline_parallel_size
    if size == 1:
        return ONLY_STAGE
    run = int.from_bytes(blake2b(vllm_config.instance_id.encode(), digest_size=8).digest()) >> 2
    return PipelineStage(get_pp_group().rank_in_group, size, run)
