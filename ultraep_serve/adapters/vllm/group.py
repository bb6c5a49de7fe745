"""The MoE layers of one process, joined into one balancer once all of them are loaded."""

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from ultraep_serve.adapters.vllm.checks import check_cpu_execution, check_layer
from ultraep_serve.adapters.vllm.cpu_experts import (
    Assignments,
    compute_and_reduce,
    dispatch_compute_combine,
    take_over_combine,
)
from ultraep_serve.balancer import Balancer, TokenView, identity_table, row_width
from ultraep_serve.config import BalanceConfig
from ultraep_serve.errors import UltraEPError, UnsupportedError
from ultraep_serve.fabric import HostFabric
from ultraep_serve.observability.control import ControlPage
from ultraep_serve.observability.recorder import Recorder
from ultraep_serve.observability.schema import RingState
from ultraep_serve.policies import warm_up
from ultraep_serve.slots import LayerSlots, SlotPool
from ultraep_serve.types import ExpertShape, Policy

__all__ = ["ExpertGroup"]

logger = init_logger("vllm.ultraep_serve")


class ExpertGroup:
    """All MoE layers of this rank: collects them while they load, then routes and runs them."""

    def __init__(self, config: BalanceConfig, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._config = config
        self._layers: list[RoutedExperts] = []
        self._balancer: Balancer | None = None
        self._recorder: Recorder | None = None

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
        assignments = Assignments.from_physical(physical, self._num_local)
        group = get_ep_group()
        if self._view is TokenView.SHARED:
            output = compute_and_reduce(layer, x, topk_weights, assignments, group)
        else:
            output = dispatch_compute_combine(layer, x, topk_weights, assignments, group.cpu_group)
        if self._balancer is not None:
            self._balancer.computed()
        return output

    def _route(self, index: int, topk_ids: torch.Tensor, batch_tokens: int) -> torch.Tensor:
        if self._balancer is None:
            return self._identity[topk_ids.long()]
        try:
            return self._balancer.route(index, topk_ids, batch_tokens)
        except UltraEPError:
            assert self._recorder is not None
            self._recorder.set_state(RingState.FAILED)
            raise

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
        if self._balancer is None:
            self._num_local = -(-num_experts // num_ranks)
            self._identity = torch.from_numpy(identity_table(num_experts, num_ranks, 0))

    def _start_balancing(self, shape: ExpertShape) -> None:
        config, group, view = self._config, get_ep_group(), self._view
        pool = SlotPool(
            shape.num_replica_slots, config.chunk_bytes, config.slot_memory == "per_layer"
        )
        slots = [adopt_experts(layer, pool) for layer in self._layers]
        control = None
        if group.rank_in_group == 0:
            control = ControlPage.create(config.run_path, config.policy)
        recorder = Recorder.create(
            run_path=config.run_path,
            rank=group.rank_in_group,
            shape=shape,
            num_layers=len(slots),
            ring_records=config.ring_records,
            engine="vllm",
            mode=view.value,
            slot_bytes=pool.size,
            timeout_seconds=config.timeout_seconds,
        )
        fabric = HostFabric(
            run_path=config.run_path,
            rank=group.rank_in_group,
            num_ranks=shape.num_ranks,
            row_width=row_width(shape.num_logical_experts, view),
            pool=pool,
            max_chunks=max(layer.chunks.shape[0] for layer in slots),
            timeout_seconds=config.timeout_seconds,
        )
        warm_up(shape)
        self._num_local = shape.num_local
        self._balancer = Balancer(config, shape, view, slots, fabric, control, recorder)
        self._recorder = recorder
        recorder.set_state(RingState.READY)
        if group.rank_in_group == 0:
            logger.info(
                "ultraep: balancing %d MoE layers over %d ranks (%s parallel), "
                "%d replica slots per rank = %.1f MiB reserved, policy %s",
                len(slots),
                shape.num_ranks,
                view.value,
                shape.num_replica_slots,
                pool.size / 2**20,
                config.policy.value,
            )


def adopt_experts(layer: RoutedExperts, pool: SlotPool) -> LayerSlots:
    """Move all tensors that make up ``layer``'s experts in front of the pool's slots.

    Which tensors these are is vLLM's own contract, ``get_expert_weights``; a parameter with one
    entry per expert that is not among them would be left behind, hence UnsupportedError.
    """
    movable = {weight.data_ptr() for weight in layer.get_expert_weights()}
    parameters = []
    for name, parameter in layer.named_parameters():
        if parameter.data_ptr() in movable:
            parameters.append(parameter)
        elif parameter.dim() and parameter.shape[0] == layer.local_num_experts:
            raise UnsupportedError(
                f"{layer.layer_name}: expert tensor {name} {tuple(parameter.shape)} cannot be "
                "moved; serve without balancing: --on-unsupported=off"
            )
    slots = pool.adopt([parameter.data for parameter in parameters])
    for parameter, alias in zip(parameters, slots.tensors, strict=True):
        parameter.data = alias
    return slots
