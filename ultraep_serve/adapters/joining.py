"""What every adapter does once its engine has loaded a model; knows no engine.

The MoE layers of one process are taken over together: their expert tensors move in front of the
replica slots, the ranks meet, and from then on one balancer routes all of them.
"""

import logging
from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from ultraep_serve.adapters.locating import find_location, wait_for_all
from ultraep_serve.adapters.parts import Parts, parts_for
from ultraep_serve.balancer import TokenView
from ultraep_serve.config import BalanceConfig
from ultraep_serve.crossing import EngineGroup
from ultraep_serve.cuda.recording import is_capturing
from ultraep_serve.errors import UltraEPError, UnsupportedError
from ultraep_serve.observability.control import ControlPage
from ultraep_serve.observability.recorder import Recorder
from ultraep_serve.observability.schema import RingState
from ultraep_serve.observability.spool import SpoolSource, SpoolWriter
from ultraep_serve.physical import identity_table
from ultraep_serve.types import ExpertShape

__all__ = ["JoinedLayers", "balanced_ids", "expert_parameters"]


class JoinedLayers:
    """All MoE layers of this rank, balanced together with those of the other ranks."""

    def __init__(
        self,
        config: BalanceConfig,
        shape: ExpertShape,
        view: TokenView,
        layers: Sequence[Sequence[nn.Parameter]],
        rank: int,
        engine: str,
        run_layer: Callable[[int], None],
        group: EngineGroup | None = None,
        parts: Parts | None = None,
    ) -> None:
        """``layers`` in the order they run, each the tensors (L, ...) that make up its experts.

        The parameters become (L + S, ...) in place. ``run_layer`` computes the first layer
        for a batch that gives every rank's masters so many assignments, to be timed; all ranks
        call it together. ``group`` is the engine's, of all ranks; without it they share this host.
        Without ``parts`` they are chosen by where the tensors live. Returns when all ranks have
        come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags, PeerTimeoutError when a rank does not
        come.
        """
        self.shape = shape
        self.location = location = find_location(config, rank, shape.num_ranks, group)
        if parts is None:
            parts = parts_for(layers[0][0].device, config, shape, view, location, group)
        for parameters in layers:
            _adopt(parameters, parts)
        self._view, self._num_layers, self._slot_bytes = view, len(layers), parts.slot_bytes
        if location.leads_host:
            ControlPage.create(config.run_path, config.policy).close()
        self._recorder = self._create_recorder(config, engine)
        parts.meet()
        wait_for_all(config, location, group)
        self._control = ControlPage.open(config.run_path)
        self._spool = self._create_spool(config, engine)
        self._costs = parts.agree_on_costs(run_layer)
        policies = self._control if rank == 0 else None
        self._balancer = parts.make_balancer(policies, self._recorder, self._costs)

    def _create_recorder(self, config: BalanceConfig, engine: str) -> Recorder:
        recorder = Recorder.create(
            run_path=config.run_path,
            rank=self.location.rank,
            shape=self.shape,
            num_layers=self._num_layers,
            ring_records=config.ring_records,
            engine=engine,
            mode=self._view.value,
            slot_bytes=self._slot_bytes,
            timeout_seconds=config.timeout_seconds,
            location=self.location,
        )
        recorder.set_policy(config.policy)  # until a batch says otherwise
        return recorder

    def _create_spool(self, config: BalanceConfig, engine: str) -> SpoolWriter | None:
        """Where all ranks see the same tokens, one records them.

        Layers of overlapping micro-batches come mixed, which a recording has no place for.
        """
        rank = self.location.rank
        if (self._view is TokenView.SHARED and rank != 0) or self.shape.num_micro_batches > 1:
            return None
        source = SpoolSource(
            rank=rank,
            num_ranks=self.shape.num_ranks,
            num_layers=self._num_layers,
            num_experts=self.shape.num_logical_experts,
            min_batch_tokens=config.min_batch_tokens,
            is_shared=self._view is TokenView.SHARED,
            engine=engine,
        )
        return SpoolWriter(config.run_path, source)

    def mark_ready(self) -> None:
        """Say that this rank balances; the launcher and the sidecar wait for it."""
        self._recorder.set_state(RingState.READY)

    def route(
        self,
        layer: int,
        topk_ids: torch.Tensor,
        batch_tokens: int,
        real_tokens: int | None = None,
        micro_batch: int = 0,
    ) -> torch.Tensor:
        """``Balancer.route``; an error also marks this rank as failed for the sidecar.

        Micro-batches, numbered from 0, may overlap: the next is routed before this is computed.

        Only the first ``real_tokens`` of ``topk_ids`` belong to requests, and are recorded while
        somebody records; None is all of them. On a GPU, recording them waits for the device.
        """
        if self._spool is not None and not is_capturing(topk_ids.device):
            if layer == 0:
                self._spool.begin(self._control.recording_word, batch_tokens)
            if self._spool.is_recording:
                self._spool.add(layer, topk_ids[:real_tokens].cpu().numpy())
        try:
            return self._balancer.route(layer, topk_ids, batch_tokens, micro_batch)
        except UltraEPError:
            self._recorder.set_state(RingState.FAILED)
            raise

    def computed(self, micro_batch: int = 0) -> None:
        """``Balancer.computed``: the engine has finished the layer that was routed last."""
        self._balancer.computed(micro_batch)

    def log_ready(self, logger: logging.Logger) -> None:
        """For the operator: what balances here, and by which costs it decides."""
        logger.info(
            "ultraep: balancing %d MoE layers over %d ranks (%s parallel)%s, "
            "%d replica slots per rank = %.1f MiB reserved, policy %s",
            self._num_layers,
            self.shape.num_ranks,
            self._view.value,
            self._domains_text(),
            self.shape.num_slots,
            self._slot_bytes / 2**20,
            self._balancer.config.policy.value,
        )
        logger.info("ultraep: costs %s", self._costs.to_json())
        if self.location.domain_size == 1:
            logger.warning(
                "ultraep: every domain has one rank, so there is nowhere to copy experts to; start "
                "more ranks by one ultraep-serve, or choose a larger --domain-size"
            )

    def _domains_text(self) -> str:
        location = self.location
        if location.num_domains == 1:
            return ""
        return f" in {location.num_domains} domains of {location.domain_size}"


def balanced_ids(shape: ExpertShape, num_assignments: int, experts_per_token: int) -> torch.Tensor:
    """Physical ids (T, K) int32 of masters in turn, at least one token; for measuring."""
    num_tokens = max(1, num_assignments // experts_per_token)
    turn = torch.arange(num_tokens * experts_per_token) % shape.num_logical_experts
    table = identity_table(shape.num_logical_experts, shape.num_ranks, shape.num_slots)
    return torch.from_numpy(table)[turn].view(num_tokens, experts_per_token)


def expert_parameters(
    module: nn.Module, name: str, num_local: int, movable: Collection[int]
) -> list[nn.Parameter]:
    """The parameters of ``module`` that make up its experts, those at the addresses ``movable``.

    Raises UnsupportedError for another parameter with one entry per local expert: it would be left
    behind when the expert is copied. ``name`` is the layer's, for the message.
    """
    found = []
    for parameter_name, parameter in module.named_parameters():
        if parameter.data_ptr() in movable:
            found.append(parameter)
        elif parameter.dim() and parameter.shape[0] == num_local:
            raise UnsupportedError(
                f"{name}: expert tensor {parameter_name} {tuple(parameter.shape)} cannot be "
                "moved; serve without balancing: --on-unsupported=off"
            )
    return found


def _adopt(parameters: Sequence[nn.Parameter], parts: Parts) -> None:
    slots = parts.adopt([parameter.data for parameter in parameters])
    for parameter, alias in zip(parameters, slots.tensors, strict=True):
        parameter.data = alias  # at once: what it held may be empty now
