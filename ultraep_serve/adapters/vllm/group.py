"""The MoE layers of one process, joined into one balancer once all of them are loaded."""

import functools

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.adapters.joining import JoinedLayers, balanced_ids, expert_parameters
from ultraep_serve.adapters.vllm.checks import check_cpu_execution, check_layer
from ultraep_serve.adapters.vllm.cpu_experts import (
    Assignments,
    compute_and_reduce,
    dispatch_compute_combine,
    take_over_combine,
)
from ultraep_serve.balancer import TokenView, identity_table
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UnsupportedError
from ultraep_serve.types import ExpertShape, Policy

__all__ = ["ExpertGroup"]

logger = init_logger("vllm.ultraep_serve")


class ExpertGroup:
    """All MoE layers of this rank: collects them while they load, then routes and runs them."""

    def __init__(self, config: BalanceConfig, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._config = config
        self._layers: list[RoutedExperts] = []
        self._joined: JoinedLayers | None = None  # None: serving without balancing

    def add(self, layer: RoutedExperts) -> int:
        """Take a layer whose weights are final, return its index; the last one starts balancing."""
        expected = len(self.vllm_config.compilation_config.static_all_moe_layers)
        if len(self._layers) == expected:
            raise UnsupportedError(
                f"{layer.layer_name} was loaded after the model's own {expected} MoE layers; "
                "draft models with experts are not there yet: serve with --policy off"
            )
        self._layers.append(layer)
        if len(self._layers) == expected:
            self._finish_loading()
        return len(self._layers) - 1

    def run(
        self, index: int, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """Complete output of layer ``index`` for this rank's tokens ``x`` (T, H)."""
        layer = self._layers[index]
        physical = self._route(index, topk_ids, self._batch_tokens(x))
        output = self._compute(layer, x, topk_weights, physical)
        if self._joined is not None:
            self._joined.computed()
        return output

    def _route(self, index: int, topk_ids: torch.Tensor, batch_tokens: int) -> torch.Tensor:
        if self._joined is None:
            return self._identity[topk_ids.long()]
        return self._joined.route(index, topk_ids, batch_tokens, _request_tokens())

    def _compute(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        physical: torch.Tensor,
    ) -> torch.Tensor:
        assignments = Assignments.from_physical(physical, self._num_local)
        group = get_ep_group()
        if self._view is TokenView.SHARED:
            return compute_and_reduce(layer, x, topk_weights, assignments, group)
        return dispatch_compute_combine(layer, x, topk_weights, assignments, group.cpu_group)

    def _batch_tokens(self, x: torch.Tensor) -> int:
        """Tokens of this batch over all ranks, the same number on every rank."""
        if self._view is TokenView.SHARED:
            return int(x.shape[0])
        metadata = get_forward_context().dp_metadata
        return int(metadata.num_tokens_across_dp_cpu.sum()) if metadata else 0

    @property
    def _view(self) -> TokenView:
        parallel = self._layers[0].moe_config.moe_parallel_config
        return TokenView.OWN if parallel.dp_size > 1 else TokenView.SHARED

    def _finish_loading(self) -> None:
        parallel = self._layers[0].moe_config.moe_parallel_config
        num_experts, num_ranks = self._layers[0].global_num_experts, parallel.ep_size
        if self._config.policy is not Policy.OFF:
            try:
                for layer in self._layers:
                    check_layer(layer)
                self._start_balancing(
                    ExpertShape(num_ranks, num_experts, self._config.num_replica_slots)
                )
            except UnsupportedError as error:
                if self._config.on_unsupported == "error":
                    raise
                logger.warning("ultraep: serving without balancing: %s", error)
        if parallel.use_ep:
            for layer in self._layers:
                check_cpu_execution(layer)
                take_over_combine(layer)
        if self._joined is None:
            self._num_local = -(-num_experts // num_ranks)
            self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

    def _start_balancing(self, shape: ExpertShape) -> None:
        self._num_local = shape.num_local
        self._joined = JoinedLayers(
            self._config,
            shape,
            self._view,
            [_expert_parameters(layer) for layer in self._layers],
            rank=get_ep_group().rank_in_group,
            engine="vllm",
            run_layer=functools.partial(self._run_layer, shape),
        )
        self._joined.mark_ready()
        if get_ep_group().rank_in_group == 0:
            self._joined.log_ready(logger)

    def _run_layer(self, shape: ExpertShape, num_assignments: int) -> None:
        """Compute the first layer for a perfectly balanced batch, for the cost model."""
        layer = self._layers[0]
        seen = num_assignments * (shape.num_ranks if self._view is TokenView.SHARED else 1)
        ids = balanced_ids(shape, seen, layer.top_k)
        x = torch.ones(ids.shape[0], layer.hidden_size, dtype=layer.w13_weight.dtype)
        self._compute(layer, x, torch.ones(ids.shape), ids)


def _request_tokens() -> int | None:
    """Of this rank's rows, how many belong to requests; None where the engine does not say.

    A rank without requests keeps step with a dummy batch, for which vLLM makes no attention
    metadata: 0. Otherwise padding follows ``num_actual_tokens`` rows. Verified with 0.32 on CPU.
    """
    metadata = get_forward_context().attn_metadata
    if not metadata:
        return 0
    if not isinstance(metadata, dict):
        return None  # one per microbatch, which CPU workers do not use
    actual: int | None = getattr(next(iter(metadata.values())), "num_actual_tokens", None)
    return actual


def _expert_parameters(layer: RoutedExperts) -> list[torch.nn.Parameter]:
    """Which tensors make up an expert is vLLM's own contract, ``get_expert_weights``."""
    movable = {weight.data_ptr() for weight in layer.get_expert_weights()}
    return expert_parameters(layer, layer.layer_name, layer.local_num_experts, movable)
