"""What every adapter does once its engine has loaded a model; knows no engine.

The MoE layers of one process are taken over together: the ranks find out how they lie on hosts,
their expert tensors move in front of the replica slots, the ranks connect, and from then on one
balancer routes all of them.
"""

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from types import ModuleType

import torch
from torch import nn

from ultraep_serve.balance.backend import Backend, GroupSetup
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.memory import HandleKind
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.speeds import fixed_speeds
from ultraep_serve.balance.watch import WATCH_SECONDS, HostBeats, HostWatch
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.rendezvous import (
    find_location,
    meet,
    wait_for_all,
)
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.errors import SelfCheckError, UltraEPError, UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.samples import Sampled
from ultraep_serve.system.topology import PipelineStage
from ultraep_serve.system.versions import versions_here
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder, RingSettings
from ultraep_serve.telemetry.ring import RingState, SelfCheck, SelfCheckOutcome
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import ExpertShape, TokenView

__all__ = [
    "BalancedLayers",
    "Batch",
    "EngineRank",
    "balanced_ids",
    "make_backend",
    "require_one_number",
]


def make_backend(device: torch.device, setup: GroupSetup) -> Backend:
    """The backend for experts on ``device``. Raises UnsupportedError, ConfigError."""
    location = setup.location
    if device.type == "cpu":
        if location.spans_hosts:
            raise UnsupportedError(
                f"--domain-size {location.domain_size}: a CPU's memory is out of other hosts' "
                f"reach; use at most the {location.host_size} ranks of a host"
            )
        from ultraep_serve.balance.host.backend import HostBackend

        return HostBackend(setup)
    if device.type != "cuda":
        raise UnsupportedError(f"experts on {device} cannot be balanced")
    # Only here: needs Triton, which a host without a GPU may do without.
    from ultraep_serve.balance.cuda.backend import DeviceBackend
    from ultraep_serve.balance.cuda.driver import open_driver

    index = torch.cuda.current_device() if device.index is None else device.index
    kind = HandleKind.FABRIC if location.spans_hosts else HandleKind.FILE_DESCRIPTOR
    return DeviceBackend(setup, open_driver(index, kind))


def _proof_of(backend: Backend) -> ModuleType:
    """``proof.host`` or ``proof.device``, with the same functions; the latter needs Triton."""
    from ultraep_serve.balance.host.backend import HostBackend

    if isinstance(backend, HostBackend):
        from ultraep_serve.proof import host

        return host
    from ultraep_serve.proof import device

    return device


@dataclass(frozen=True)
class EngineRank:
    """A rank as its engine knows it."""

    engine: str  # "vllm", "sglang"
    rank: int
    group: EngineGroup | None = None  # None: all ranks share this host
    pipeline: PipelineStage = field(default_factory=PipelineStage)  # the stage of all ranks
    answers: Answers | None = None  # for the self-check; None: it cannot compare outputs


@dataclass(frozen=True)
class Batch:
    """The batch, or the micro-batch, that a layer is called for."""

    tokens: int  # sum over all ranks with padding, the same on every rank
    micro_batch: int = 0  # numbered from 0; the next may be routed before this one is computed


class BalancedLayers:
    """All MoE layers of this rank, balanced together with those of the other ranks."""

    def __init__(
        self,
        config: BalanceConfig,
        shape: ExpertShape,
        view: TokenView,
        layers: Sequence[Sequence[nn.Parameter]],
        run_layer: Callable[[int], None],
        own: EngineRank,
        make_backend: Callable[[torch.device, GroupSetup], Backend] = make_backend,
    ) -> None:
        """``layers`` in the order they run, each the tensors (L, ...) that make up its experts.

        The parameters become (L + S, ...) in place. ``run_layer`` computes the first layer
        for a batch that gives every rank's masters so many assignments, to be timed; all ranks
        call it together. Returns when all ranks have come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags or there is not one speed per rank,
        PeerTimeoutError when a rank does not come, SelfCheckError on all ranks when one computes
        what it should not.
        """
        fixed_speeds(config.speeds, shape.num_ranks)
        group, pipeline = own.group, own.pipeline
        location = find_location(config, own.rank, shape.num_ranks, group)
        config = meet(config, location, group, pipeline)
        self._run_path, self._pipeline, self._engine = config.run_path, pipeline, own.engine
        config = _in_own_directory(config, pipeline)
        self._setup = setup = GroupSetup(config, shape, view, location, group)
        if layers[0][0].device.type == "cuda":
            tuned = RunFiles(self._run_path).tuned
            use_tuned_kernels(self._engine, shape.num_slots, tuned)
        self._num_layers = len(layers)
        backend = make_backend(layers[0][0].device, setup)
        for parameters in layers:
            _adopt(parameters, backend)
        self._slot_bytes = backend.slot_bytes
        page = None
        if location.is_host_primary:
            page = ControlPage.create(self._run_path, config.policy, allow_ideal=config.allow_ideal)
        self._recorder = self._create_recorder()
        if page is not None:
            self._recorder.watch(page.file)
        backend.connect()
        wait_for_all(setup)
        self._watch = self._watch_hosts()
        self._costs = backend.calibrate(run_layer)
        if location.is_host_primary and pipeline.number == 0:
            RunFiles(self._run_path).write_costs(self._costs)
        proof = _proof_of(backend)
        self.self_check = self._check_itself(proof, backend, own)
        self._recorder.set_self_check(self.self_check)
        sampled = self._sampled(layers, own.answers)
        policies = page if own.rank == 0 else None
        samples = sampled and proof.samples_of(backend, sampled, self._recorder, policies)
        self._balancer = backend.make_balancer(policies, self._recorder, self._costs, samples)

    def _sampled(
        self, layers: Sequence[Sequence[nn.Parameter]], answers: Answers | None
    ) -> Sampled | None:
        setup = self._setup
        if not setup.config.verify_every:
            return None
        number = self._pipeline.number * setup.shape.num_ranks + setup.location.rank
        path = RunFiles(self._run_path).verification(number)
        return Sampled(layers, answers, path, lambda: versions_here(self._engine))

    def _create_recorder(self) -> Recorder:
        setup, config = self._setup, self._setup.config
        settings = RingSettings(
            num_layers=self._num_layers,
            engine=self._engine,
            mode=setup.view.value,
            slot_bytes=self._slot_bytes,
            timeout_seconds=config.timeout_seconds,
        )
        recorder = Recorder.create(
            self._run_path, setup.location, setup.shape, settings, self._pipeline
        )
        recorder.set_policy(config.policy)  # until a batch says otherwise
        # Before the run directory is left.
        Finalize(None, recorder.close, exitpriority=1)
        return recorder

    def _check_itself(self, proof: ModuleType, backend: Backend, own: EngineRank) -> SelfCheck:
        wanted = self._setup.config.self_check
        if wanted == "off":
            return SelfCheck(SelfCheckOutcome.OFF)
        # Not above: it imports numba, see ``plan.context``.
        from ultraep_serve.proof.start import run_self_check

        stages, context = proof.stages_of(backend), self._setup.context
        try:
            results = run_self_check(context, stages, own.answers, full=wanted == "full")
        except SelfCheckError as error:
            self._recorder.set_self_check(SelfCheck(SelfCheckOutcome.FAILED, error.results))
            raise
        return SelfCheck(SelfCheckOutcome.PASSED, tuple(results))

    def _watch_hosts(self) -> HostWatch:
        """Watch other hosts, whose ranks may still load: this is not the end of it."""
        setup, location, beats = self._setup, self._setup.location, None
        num_hosts = location.num_ranks // location.host_size * self._pipeline.num_stages
        store = None if setup.engine_group is None else setup.engine_group.store
        if num_hosts > 1 and location.is_host_primary and store is not None:
            beats = HostBeats(store, location, self._pipeline)
        files = RunFiles(self._run_path)
        watch = HostWatch(files, self._recorder, setup.connect_seconds, beats)
        self._recorder.at_heartbeat(watch.look)
        return watch

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
        self._balancer.end_loading()
        self._watch.seconds = seconds
        if self._setup.engine_group is not None:  # where a host is lost, the watch speaks first
            self._setup.engine_group.bound_waits(seconds + WATCH_SECONDS)
        if self._setup.location.is_host_primary:
            logger.info("ultraep: loading has ended; ranks wait %g s for each other", seconds)

    def route(self, layer: int, topk_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Physical ids for ``topk_ids`` (T, K) of ``layer``, of the same type.

        ``LayerBalancer.route``; an error also marks this rank as failed for the sidecar.
        """
        try:
            physical = self._balancer.route(layer, topk_ids, batch.tokens, batch.micro_batch)
        except UltraEPError as error:
            self._recorder.fail(str(error))
            raise
        return physical.to(topk_ids.dtype)

    def computed(self, micro_batch: int = 0) -> None:
        """Take note that the engine has finished the layer; see ``LayerBalancer.computed``.

        Errors as in ``route``.
        """
        try:
            self._balancer.computed(micro_batch)
        except UltraEPError as error:
            self._recorder.fail(str(error))
            raise

    def _log_ready(self, logger: logging.Logger) -> None:
        setup, location = self._setup, self._setup.location
        domains = stage = ""
        if self._pipeline.num_stages > 1:
            stage = f" of pipeline stage {self._pipeline.number}"
        if location.num_domains > 1:
            domains = f" in {location.num_domains} domains of {location.domain_size}"
        logger.info(
            "ultraep: balancing %d MoE layers%s over %d ranks (%s parallel)%s, "
            "%d replica slots per rank = %.1f MiB reserved, policy %s",
            self._num_layers,
            stage,
            setup.shape.num_ranks,
            setup.view.value,
            domains,
            setup.shape.num_slots,
            self._slot_bytes / 2**20,
            setup.config.policy.value,
        )
        logger.info("ultraep: costs %s", self._costs.to_json())
        for check in self.self_check.checks:
            logger.info(
                "ultraep: self-check %s passed in %.1f s: %s",
                check.name,
                check.seconds,
                check.detail,
            )
            if check.warning:
                logger.warning("ultraep: self-check %s: %s", check.name, check.warning)
        if location.domain_size == 1:
            logger.warning(
                "ultraep: every domain has one rank, so there is nowhere to copy experts to; start "
                "more ranks by one ultraep-serve, or choose a larger --domain-size"
            )


@functools.lru_cache(maxsize=1)
def balanced_ids(
    shape: ExpertShape, num_assignments: int, experts_per_token: int, device: torch.device
) -> torch.Tensor:
    """Physical ids (T, K) int32 of masters in turn, at least one token; for measuring.

    They are made on ``device``, once for all repetitions; not to be written to.
    """
    num_tokens = max(1, num_assignments // experts_per_token)
    turn = torch.arange(num_tokens * experts_per_token, device=device) % shape.num_logical_experts
    table = identity_table(shape.num_logical_experts, shape.num_ranks, shape.num_slots)
    return torch.from_numpy(table).to(device)[turn].view(num_tokens, experts_per_token)


def _in_own_directory(config: BalanceConfig, pipeline: PipelineStage) -> BalanceConfig:
    """Give ``config`` a directory in which only the ranks of this pipeline stage meet."""
    if pipeline.number == 0:
        return config
    path = RunFiles(config.run_path).stage(pipeline.number)
    path.mkdir(mode=0o700, exist_ok=True)
    return config.replace(run_dir=str(path))


def _adopt(parameters: Sequence[nn.Parameter], backend: Backend) -> None:
    slots = backend.adopt([parameter.data for parameter in parameters])
    for parameter, alias in zip(parameters, slots.tensors, strict=True):
        parameter.data = alias  # at once: what it held may be empty now


def require_one_number(num_experts: Collection[int]) -> None:
    """Raise UnsupportedError unless all layers have the same number of experts."""
    if len(numbers := set(num_experts)) > 1:
        raise UnsupportedError(
            f"MoE layers with different numbers of experts {sorted(numbers)} share no slots"
        )
