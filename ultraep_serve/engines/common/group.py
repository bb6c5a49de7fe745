"""The MoE layers of one rank, balanced together with those of the other ranks; knows no engine.

The ranks find out how they lie on hosts, their expert tensors move in front of the replica slots,
the ranks connect, measure and check themselves, and from then on one balancer routes all layers:
the adapter's stages call it.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import nn

from ultraep_serve.balance.agreement import find_location, require_agreement, unanimous
from ultraep_serve.balance.backend import Backend, GroupSetup, LayerBalancer
from ultraep_serve.balance.collectives import gather_bytes
from ultraep_serve.balance.watch import HostBeats, Watch
from ultraep_serve.config import BalanceConfig
from ultraep_serve.costs.model import NEW_COPIES, fewest_assignments
from ultraep_serve.engines.common.backends import make_backend, proof_of
from ultraep_serve.engines.common.loaded import (
    EngineRank,
    Execution,
    Flow,
    LoadedLayers,
    MovableLayers,
    movable,
)
from ultraep_serve.engines.common.memory import chosen_slot_memory, require_memory
from ultraep_serve.engines.common.run import meet
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.engines.common.weights import ExpertWeights, Layer
from ultraep_serve.errors import SelfCheckError
from ultraep_serve.proof.samples import Sampled
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.versions import versions_here
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder
from ultraep_serve.telemetry.ring import RingState, SelfCheck, SelfCheckOutcome
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import CheckResult


def start_balancing(
    config: BalanceConfig,
    execution: Execution[Layer],
    loaded: LoadedLayers[Layer],
    own: EngineRank,
    flow: Flow,
) -> "BalancedLayers":
    """Give slots to all layers, join the ranks, and have ``flow`` balance.

    All ranks call this together. Raises UnsupportedError, on all of them alike and with nothing of
    this left, and what ``BalancedLayers`` raises.
    """
    layers, shape = loaded.weights, loaded.shape
    require_agreement(loaded.shared, own.group.on_host, config)
    with ExitStack() as undo:
        undo.callback(execution.take_slots, layers, shape)
        with unanimous(own.group, config):
            execution.give_slots(layers, shape)
        balanced = BalancedLayers(config, own, movable(execution, loaded, own.rank))
        undo.pop_all()
    execution.keep_slots()
    balanced.hold(layers, execution.kernel)
    flow.balancer = balanced.balancer
    return balanced


class BalancedLayers:
    """All MoE layers of this rank, balanced together with those of the other ranks."""

    def __init__(self, config: BalanceConfig, own: EngineRank, layers: MovableLayers) -> None:
        """The parameters of ``layers`` become (L + S, ...) in place.

        All ranks call this together; it returns when all have come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags, as ``GroupSetup`` does, or where a
        CPU host has too little memory for the largest batch,
        PeerTimeoutError when a rank does not come, SelfCheckError on all ranks when one computes
        what it should not.
        """
        self._own, self._layers = own, layers
        self._held: Sequence[ExpertWeights[Any]] = ()
        self._is_made = False
        self._setup = self._meet(config)
        with ExitStack() as undo:  # of ranks that go on without this
            backend = self._adopt(undo)
            page = self._control_page(undo)
            self._recorder = self._create_recorder(undo)
            self._connect(backend, page)
            self._watch = self._watch_others(backend, undo)
            if layers.answers is not None and layers.largest_batch is not None:
                largest, cache = layers.largest_batch, own.cache_bytes
                require_memory(self._setup, layers.answers, largest, cache)
            self._costs = backend.calibrate(layers.run_first)
            self._setup = backend.setup = self._with_smallest_batch()
            if page is not None and own.pipeline.number == 0:
                self._files.write_costs(self._costs)
            stages_of, make_samples = proof_of(backend)
            self.self_check = self._check_itself(stages_of, backend)
            undo.pop_all()
        if reason := self._setup.why_never_balanced(self._costs, layers.largest_batch):
            settings = CheckResult("settings", 0.0, "", reason)
            self.self_check = replace(self.self_check, checks=(*self.self_check.checks, settings))
        self._recorder.set_self_check(self.self_check)
        policies, sampled = page if own.rank == 0 else None, self._sampled()
        given = self._setup, backend.fabric, sampled, self._recorder, policies
        samples = make_samples(*given) if sampled else None
        self.balancer: LayerBalancer = backend.make_balancer(
            policies, self._recorder, self._costs, samples
        )
        self._is_made = True

    def _meet(self, config: BalanceConfig) -> GroupSetup:
        """Find the other ranks, and a run directory for those of this host.

        Ranks of a later pipeline stage meet in a directory of their own in it.
        """
        own, layers = self._own, self._layers
        location = find_location(config, own.rank, own.group)
        path = meet(config, location, own.group, own.pipeline)
        self._files = RunFiles(path)
        if own.pipeline.number:
            path = self._files.stage(own.pipeline.number)
            path.mkdir(mode=0o700, exist_ok=True)
        given = config, layers.shape, layers.view, location, own.group
        setup = GroupSetup(*given, run_path=path)
        slot_memory = chosen_slot_memory(setup, layers.parameters)
        return replace(setup, config=config.replace(slot_memory=slot_memory))

    def _adopt(self, undo: ExitStack) -> Backend:
        """Move the experts in front of slots; ``undo`` moves them back."""
        setup, layers = self._setup, self._layers.parameters
        device, shape = layers[0][0].device, setup.shape
        if device.type == "cuda":
            engine = self._own.engine
            undo.callback(use_tuned_kernels(engine, shape.num_slots, self._files.tuned))
        with unanimous(self._own.group, setup.config):
            backend = make_backend(device, setup)
            undo.callback(backend.close)
            for parameters in layers:
                slots = backend.adopt([parameter.data for parameter in parameters])
                for parameter, alias in zip(parameters, slots.tensors, strict=True):
                    parameter.data = alias  # at once: what it held may be empty now
                undo.callback(_move_back, parameters, shape.num_masters)
        self._slot_bytes = backend.slot_bytes
        return backend

    def _control_page(self, undo: ExitStack) -> ControlPage | None:
        """The control page, which one rank of a host has."""
        config = self._setup.config
        if not self._setup.location.is_host_primary:
            return None
        page = ControlPage.create(self._files.path, config.policy, allow_ideal=config.allow_ideal)
        undo.callback(page.file.path.unlink, missing_ok=True)
        undo.callback(page.file.close)
        return page

    def _create_recorder(self, undo: ExitStack) -> Recorder:
        setup, own = self._setup, self._own
        recorder = Recorder.create(
            self._files.path,
            setup.location,
            setup.shape,
            own.pipeline,
            num_layers=self.num_layers,
            engine=own.engine,
            mode=setup.view.value,
            slot_bytes=self._slot_bytes,
        )
        recorder.set_policy(setup.config.policy)  # until a batch says otherwise
        undo.callback(recorder.path.unlink, missing_ok=True)
        # Before the run directory is left.
        undo.callback(Finalize(None, recorder.close, exitpriority=1))
        return recorder

    def _connect(self, backend: Backend, page: ControlPage | None) -> None:
        if page is not None:
            self._recorder.watch(page.file)
        group = self._own.group
        with unanimous(group, self._setup.config):
            backend.connect()
        if self._setup.location.num_domains > 1:  # all have come this far
            gather_bytes(group.on_host, b"here", self._setup.connect_seconds)

    def _watch_others(self, backend: Backend, undo: ExitStack) -> Watch:
        """Watch other hosts, whose ranks may still load: this is not the end of it."""
        setup, location, beats = self._setup, self._setup.location, None
        num_hosts = location.num_ranks // location.host_size * self._own.pipeline.num_stages
        store = self._own.group.store
        if num_hosts > 1 and location.is_host_primary and store is not None:
            beats = HostBeats(store, location, self._own.pipeline)
            undo.callback(beats.stop)
        watch = Watch(
            self._files,
            self._recorder,
            setup.connect_seconds,
            server=first_process(),
            beats=beats,
            neighbours=backend.neighbours,
            is_waiting=lambda: not self._is_made or self.balancer.is_waiting,
        )
        self._recorder.at_heartbeat(watch.look)
        return watch

    def _with_smallest_batch(self) -> GroupSetup:
        """What is too small a batch, by costs that all ranks have alike, unless somebody chose."""
        config, layers = self._setup.config, self._layers
        if config.min_batch_tokens:
            return self._setup
        copies = 0 if self.copies_stay else NEW_COPIES
        costs, shape = self._costs.integer_costs(), self._setup.shape
        paying = fewest_assignments(costs, shape, copies, layers.largest_batch)
        tokens = max(config.least_tokens, -(-paying // layers.experts_per_token))
        return replace(self._setup, config=config.replace(min_batch_tokens=tokens))

    def _check_itself(self, stages_of: Callable[[Any], Any], backend: Backend) -> SelfCheck:
        wanted = self._setup.config.self_check
        if wanted == "off":
            return SelfCheck(SelfCheckOutcome.OFF)
        # Not above: it imports numba, see ``plan.context``.
        from ultraep_serve.proof.start import run_self_check

        stages, context = stages_of(backend), self._setup.context
        try:
            results = run_self_check(context, stages, self._layers.answers, full=wanted == "full")
        except SelfCheckError as error:
            self._recorder.set_self_check(SelfCheck(SelfCheckOutcome.FAILED, error.results))
            raise
        return SelfCheck(SelfCheckOutcome.PASSED, tuple(results))

    def _sampled(self) -> Sampled | None:
        own, setup, layers = self._own, self._setup, self._layers
        if not setup.config.verify_every:
            return None
        number = own.pipeline.number * setup.shape.num_ranks + setup.location.rank
        path = self._files.verification(number)
        return Sampled(layers.parameters, layers.answers, path, lambda: versions_here(own.engine))

    def mark_ready(self, logger: logging.Logger) -> None:
        """Say that this rank balances; the sidecar waits for it.

        The operator reads in ``logger`` once per host what balances, and by which costs.
        """
        self._recorder.set_state(RingState.READY)
        if self._setup.location.is_host_primary:
            self._log_ready(logger)

    def end_loading(self, logger: logging.Logger) -> None:
        """From the next batch on, expect others to answer within the timeout.

        Before this they may be compiling, or trying out batches of their own making. The adapter
        calls it when its engine is through with that, which ranks need not be at the same moment.
        """
        seconds = self._setup.config.timeout_seconds
        self.balancer.end_loading()
        self._watch.seconds = seconds
        if self._setup.location.is_host_primary:
            logger.info("ultraep: loading has ended; ranks wait %g s for each other", seconds)

    @property
    def copies_stay(self) -> bool:
        """Whether slots may hold copies of weights that are replaced; see ``forget``."""
        return self._setup.config.slot_memory == "per_layer"

    @property
    def num_layers(self) -> int:
        return len(self._layers.parameters)

    def hold(
        self, layers: Sequence[ExpertWeights[Layer]], kernel: Callable[[Layer], object]
    ) -> None:
        """Have ``layers`` show masters alone, and remember what computes them, by ``kernel``."""
        for layer in layers:
            layer.hide_slots(self._setup.shape.num_masters, kernel)
        self._held = layers

    def require_in_place(self) -> None:
        """Raise UnsupportedError where the experts of a layer were replaced; before every batch."""
        for layer in self._held:
            layer.require_in_place()

    def _log_ready(self, logger: logging.Logger) -> None:
        setup, location = self._setup, self._setup.location
        domains = stage = ""
        if self._own.pipeline.num_stages > 1:
            stage = f" of pipeline stage {self._own.pipeline.number}"
        if location.num_domains > 1:
            domains = f" in {location.num_domains} domains of {location.domain_size}"
        logger.info(
            "ultraep: balancing %d MoE layers%s over %d ranks (%s parallel)%s, "
            "%d replica slots per rank%s = %.1f MiB reserved (slot memory %s), policy %s",
            self.num_layers,
            stage,
            setup.shape.num_ranks,
            setup.view.value,
            domains,
            setup.shape.num_slots,
            " and layer" if setup.config.slot_memory == "per_layer" else "",
            self._slot_bytes / 2**20,
            setup.config.slot_memory,
            setup.config.policy.value,
        )
        logger.info("ultraep: costs %s", self._costs.to_json())
        tokens = setup.config.min_batch_tokens
        logger.info("ultraep: batches of fewer than %d tokens are left alone", tokens)
        for check in self.self_check.checks:
            if check.detail:
                passed = f"passed in {check.seconds:.1f} s: {check.detail}"
                logger.info("ultraep: self-check %s %s", check.name, passed)
            if check.warning:
                logger.warning("ultraep: self-check %s: %s", check.name, check.warning)


def _move_back(parameters: Sequence[nn.Parameter], num_masters: int) -> None:
    """Give masters, which may stand in front of slots, memory of their own again."""
    for parameter in parameters:
        masters = parameter.data[:num_masters]
        parameter.data = torch.empty_strided(
            masters.shape, masters.stride(), dtype=masters.dtype, device=masters.device
        ).copy_(masters)
