"""The MoE layers of one rank, balanced together with those of the other ranks; knows no engine.

An adapter describes a model that its engine has loaded (``LoadedLayers``), and how its layers get
room for slots and are computed (``Execution``). Here the ranks find out how they lie on hosts,
their expert tensors move in front of the replica slots, the ranks connect, and from then on one
balancer routes all layers: the adapter's stages call it (``Flow``).
"""

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ultraep_serve.balance.agreement import (
    SharedValues,
    find_location,
    require_agreement,
    unanimous,
    wait_for_all,
)
from ultraep_serve.balance.backend import Backend, GroupSetup, LayerBalancer
from ultraep_serve.balance.collectives import EngineGroup
from ultraep_serve.balance.make_backend import make_backend
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.watch import HostBeats, Watch
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.memory import chosen_slot_memory, require_memory
from ultraep_serve.engines.common.run import meet
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.engines.common.weights import ExpertWeights
from ultraep_serve.errors import SelfCheckError, UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.samples import Sampled
from ultraep_serve.proof.settings import why_never_balanced
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.topology import PipelineStage
from ultraep_serve.system.versions import versions_here
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.recorder import Recorder, RingSettings
from ultraep_serve.telemetry.ring import RingState, SelfCheck, SelfCheckOutcome
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import CheckResult, ExpertShape, TokenView

__all__ = [
    "BalancedLayers",
    "EngineRank",
    "Execution",
    "Flow",
    "LoadedLayers",
    "balanced_ids",
    "require_one_number",
    "start_balancing",
    "summed",
]

Layer = TypeVar("Layer", bound=nn.Module)  # an engine's MoE layer


@dataclass(frozen=True)
class EngineRank:
    """A rank as its engine knows it."""

    engine: str  # "vllm", "sglang"
    rank: int
    group: EngineGroup | None = None  # None: all ranks share this host
    pipeline: PipelineStage = field(default_factory=PipelineStage)  # the stage of all ranks
    cache_bytes: int = 0  # of a CPU's memory that the engine has yet to take for keys and values


@dataclass(frozen=True)
class LoadedLayers(Generic[Layer]):
    """The MoE layers of one rank, in the order they run; their weights are final."""

    weights: Sequence[ExpertWeights[Layer]]
    shared: Sequence[SharedValues]  # what experts of a layer have in common
    shape: ExpertShape
    view: TokenView
    experts_per_token: int  # K
    hidden_size: int  # H
    dtype: torch.dtype  # of the layers' input and output
    largest_batch: int | None  # tokens over all ranks; None: the engine sets no bound


class Execution(ABC, Generic[Layer]):
    """How an engine computes layers; all ranks call it alike."""

    @abstractmethod
    def give_slots(self, layers: Sequence[ExpertWeights[Layer]], shape: ExpertShape) -> None:
        """Have ``layers`` serve L + S physical experts on this rank instead of L.

        Ids are physical from then on, and the layers' dispatch is balanced. Parameters have rows
        for the masters alone meanwhile. Raises UnsupportedError.
        """

    @abstractmethod
    def take_slots(self, layers: Sequence[ExpertWeights[Layer]], shape: ExpertShape) -> None:
        """Have ``layers`` serve what they did before ``give_slots``, some of which it may have."""

    def keep_slots(self) -> None:
        """Give up what ``take_slots`` would need: the layers stay balanced."""

    @abstractmethod
    def compute(
        self, layer: Layer, x: torch.Tensor, topk_weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        """The whole output (T, H) for this rank's tokens ``x`` (T, H), outside of a batch.

        ``topk_weights`` and ``physical`` (T, K).
        """

    @abstractmethod
    def kernel(self, layer: Layer) -> object:
        """What dispatches and computes ``layer``; another one, where weights were made anew."""


class Flow:
    """What the stages of a model's layers have in common."""

    def __init__(self) -> None:
        self.balancer: LayerBalancer | None = None  # None: ids are taken as they come

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Take ids as they come within: they are physical already."""
        balancer, self.balancer = self.balancer, None
        try:
            yield
        finally:
            self.balancer = balancer


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
    assert own.group is not None, "engines have a group of all ranks"
    require_agreement(loaded.shared, own.group.on_host, config)
    answers = _answers(execution, loaded, own.rank)
    run_layer = functools.partial(_run_first_layer, execution, loaded)
    largest = loaded.largest_batch and loaded.largest_batch * loaded.experts_per_token
    parameters = [layer.parameters for layer in layers]
    with ExitStack() as undo:
        undo.callback(execution.take_slots, layers, shape)
        with unanimous(own.group, config):
            execution.give_slots(layers, shape)
        balanced = BalancedLayers(
            config, shape, loaded.view, parameters, run_layer, own, answers=answers, largest=largest
        )
        undo.pop_all()
    execution.keep_slots()
    balanced.hold(layers, execution.kernel)
    flow.balancer = balanced.balancer
    return balanced


def _answers(execution: Execution[Layer], loaded: LoadedLayers[Layer], rank: int) -> Answers:
    def compute(
        index: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        # kernels may write their output into x, or empty it
        return execution.compute(loaded.weights[index].layer, x.clone(), weights, physical)

    return Answers(
        compute=compute,
        experts_per_token=loaded.experts_per_token,
        hidden_size=loaded.hidden_size,
        dtype=loaded.dtype,
        device=loaded.weights[0].parameters[0].device,
        seed=rank if loaded.view is TokenView.OWN else 0,
    )


def _run_first_layer(
    execution: Execution[Layer], loaded: LoadedLayers[Layer], num_assignments: int
) -> None:
    """Compute a batch that gives every rank's masters so many assignments, for the cost model.

    All of its tokens are alike. On a device the batch is launched, and nobody waits for it.
    """
    device, shape = loaded.weights[0].parameters[0].device, loaded.shape
    seen = num_assignments * (shape.num_ranks if loaded.view is TokenView.SHARED else 1)
    ids = balanced_ids(shape, seen, loaded.experts_per_token, device)
    x = torch.ones((ids.shape[0], loaded.hidden_size), dtype=loaded.dtype, device=device)
    execution.compute(loaded.weights[0].layer, x, torch.ones(ids.shape, device=device), ids)


def summed(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum in float32 of the ranks' parts of an ``output`` (T, H) of the same tokens."""
    total = output.float()
    dist.all_reduce(total, group=group)
    return total


def _proof_of(backend: Backend) -> ModuleType:
    """``proof.host`` or ``proof.device``, with the same functions; the latter needs Triton."""
    from ultraep_serve.balance.host.backend import HostBackend

    if isinstance(backend, HostBackend):
        from ultraep_serve.proof import host

        return host
    from ultraep_serve.proof import device

    return device


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
        answers: Answers | None = None,
        largest: int | None = None,
    ) -> None:
        """``layers`` in the order they run, each the tensors (L, ...) that make up its experts.

        The parameters become (L + S, ...) in place. ``run_layer`` computes the first layer
        for a batch that gives every rank's masters so many assignments, to be timed; all ranks
        call it together. ``answers`` None: the self-check cannot compare outputs. ``largest``
        batch, see ``why_never_balanced``. Returns when all ranks have come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags, as ``GroupSetup`` does, or where a
        CPU host has too little memory for the largest batch,
        PeerTimeoutError when a rank does not come, SelfCheckError on all ranks when one computes
        what it should not.
        """
        self._own, self._layers, self._answers = own, layers, answers
        self._held: Sequence[ExpertWeights[Any]] = ()
        self._is_made = False
        self._setup = self._meet(config, shape, view)
        with ExitStack() as undo:  # of ranks that go on without this
            backend = self._adopt(make_backend, undo)
            page = self._connect(backend, undo)
            if answers is not None and largest is not None:
                require_memory(self._setup, answers, largest, own.cache_bytes)
            self._costs = backend.calibrate(run_layer)
            if page is not None and own.pipeline.number == 0:
                RunFiles(self._run_path).write_costs(self._costs)
            proof = _proof_of(backend)
            self.self_check = self._check_itself(proof, backend)
            undo.pop_all()
        if reason := why_never_balanced(self._setup, self._costs, largest):
            settings = CheckResult("settings", 0.0, "", reason)
            self.self_check = replace(self.self_check, checks=(*self.self_check.checks, settings))
        self._recorder.set_self_check(self.self_check)
        policies, sampled = page if own.rank == 0 else None, self._sampled()
        samples = sampled and proof.samples_of(backend, sampled, self._recorder, policies)
        self.balancer: LayerBalancer = backend.make_balancer(
            policies, self._recorder, self._costs, samples
        )

    def _meet(self, config: BalanceConfig, shape: ExpertShape, view: TokenView) -> GroupSetup:
        """Find the other ranks, and a run directory for those of this host."""
        own = self._own
        location = find_location(config, own.rank, shape.num_ranks, own.group)
        config = meet(config, location, own.group, own.pipeline)
        self._run_path = config.run_path
        config = _in_own_directory(config, own.pipeline)
        setup = GroupSetup(config, shape, view, location, own.group)
        slot_memory = chosen_slot_memory(setup, self._layers)
        return replace(setup, config=config.replace(slot_memory=slot_memory))

    def _adopt(
        self, make_backend: Callable[[torch.device, GroupSetup], Backend], undo: ExitStack
    ) -> Backend:
        """Move the experts in front of slots; ``undo`` moves them back."""
        device, group = self._layers[0][0].device, self._setup.engine_group
        if device.type == "cuda":
            num_slots, target = self._setup.shape.num_slots, RunFiles(self._run_path).tuned
            undo.callback(use_tuned_kernels(self._own.engine, num_slots, target))
        with unanimous(group, self._setup.config):
            backend = make_backend(device, self._setup)
            undo.callback(backend.close)
            for parameters in self._layers:
                slots = backend.adopt([parameter.data for parameter in parameters])
                for parameter, alias in zip(parameters, slots.tensors, strict=True):
                    parameter.data = alias  # at once: what it held may be empty now
                undo.callback(_move_back, parameters, self._setup.shape.num_masters)
        self._slot_bytes = backend.slot_bytes
        return backend

    def _connect(self, backend: Backend, undo: ExitStack) -> ControlPage | None:
        """Reach the other ranks, and watch them; returns the control page, which one rank has."""
        setup, page = self._setup, None
        if setup.location.is_host_primary:
            page = ControlPage.create(
                self._run_path, setup.config.policy, allow_ideal=setup.config.allow_ideal
            )
            undo.callback(page.file.path.unlink, missing_ok=True)
            undo.callback(page.file.close)
        self._recorder = self._create_recorder(undo)
        if page is not None:
            self._recorder.watch(page.file)
        with unanimous(setup.engine_group, setup.config):
            backend.connect()
        wait_for_all(setup)
        self._watch = self._watch_others(backend, undo)
        return page

    def _sampled(self) -> Sampled | None:
        own, setup = self._own, self._setup
        if not setup.config.verify_every:
            return None
        number = own.pipeline.number * setup.shape.num_ranks + setup.location.rank
        path = RunFiles(self._run_path).verification(number)
        return Sampled(self._layers, self._answers, path, lambda: versions_here(own.engine))

    def _create_recorder(self, undo: ExitStack) -> Recorder:
        setup, config = self._setup, self._setup.config
        settings = RingSettings(
            num_layers=len(self._layers),
            engine=self._own.engine,
            mode=setup.view.value,
            slot_bytes=self._slot_bytes,
            timeout_seconds=config.timeout_seconds,
        )
        recorder = Recorder.create(
            self._run_path, setup.location, setup.shape, settings, self._own.pipeline
        )
        recorder.set_policy(config.policy)  # until a batch says otherwise
        undo.callback(recorder.path.unlink, missing_ok=True)
        # Before the run directory is left.
        undo.callback(Finalize(None, recorder.close, exitpriority=1))
        return recorder

    def _check_itself(self, proof: ModuleType, backend: Backend) -> SelfCheck:
        wanted = self._setup.config.self_check
        if wanted == "off":
            return SelfCheck(SelfCheckOutcome.OFF)
        # Not above: it imports numba, see ``plan.context``.
        from ultraep_serve.proof.start import run_self_check

        stages, context = proof.stages_of(backend), self._setup.context
        try:
            results = run_self_check(context, stages, self._answers, full=wanted == "full")
        except SelfCheckError as error:
            self._recorder.set_self_check(SelfCheck(SelfCheckOutcome.FAILED, error.results))
            raise
        return SelfCheck(SelfCheckOutcome.PASSED, tuple(results))

    def _watch_others(self, backend: Backend, undo: ExitStack) -> Watch:
        """Watch other hosts, whose ranks may still load: this is not the end of it."""
        setup, location, beats = self._setup, self._setup.location, None
        num_hosts = location.num_ranks // location.host_size * self._own.pipeline.num_stages
        store = None if setup.engine_group is None else setup.engine_group.store
        if num_hosts > 1 and location.is_host_primary and store is not None:
            beats = HostBeats(store, location, self._own.pipeline)
            undo.callback(beats.stop)
        watch = Watch(
            RunFiles(self._run_path),
            self._recorder,
            setup.connect_seconds,
            server=first_process(),
            beats=beats,
            neighbours=backend.neighbours,
            is_waiting=lambda: not self._is_made or self.balancer.is_waiting,
        )
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
        """How many layers are balanced on this rank."""
        return len(self._layers)

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
            len(self._layers),
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
        for check in self.self_check.checks:
            if check.detail:
                passed = f"passed in {check.seconds:.1f} s: {check.detail}"
                logger.info("ultraep: self-check %s %s", check.name, passed)
            if check.warning:
                logger.warning("ultraep: self-check %s: %s", check.name, check.warning)


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


def _move_back(parameters: Sequence[nn.Parameter], num_masters: int) -> None:
    """Give masters, which may stand in front of slots, memory of their own again."""
    for parameter in parameters:
        masters = parameter.data[:num_masters]
        parameter.data = torch.empty_strided(
            masters.shape, masters.stride(), dtype=masters.dtype, device=masters.device
        ).copy_(masters)


def require_one_number(num_experts: Collection[int]) -> None:
    """Raise UnsupportedError unless all layers have the same number of experts."""
    if len(numbers := set(num_experts)) > 1:
        raise UnsupportedError(
            f"MoE layers with different numbers of experts {sorted(numbers)} share no slots"
        )
