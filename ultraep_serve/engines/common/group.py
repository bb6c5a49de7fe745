"""The MoE layers of one rank, balanced together with those of the other ranks; knows no engine.

An adapter describes a model that its engine has loaded (``LoadedLayers``), and how its layers get
room for slots and are computed (``Execution``). Here the ranks find out how they lie on hosts,
their expert tensors move in front of the replica slots, the ranks connect, and from then on one
balancer routes all layers: the adapter's stages call it (``Flow``).
"""

import functools
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ultraep_serve.balance.agreement import (
    SharedValues,
    find_location,
    require_agreement,
    wait_for_all,
)
from ultraep_serve.balance.backend import Backend, GroupSetup, LayerBalancer
from ultraep_serve.balance.collectives import EngineGroup, HostAllGather
from ultraep_serve.balance.make_backend import make_backend
from ultraep_serve.balance.physical import identity_table
from ultraep_serve.balance.speeds import fixed_speeds
from ultraep_serve.balance.watch import WATCH_SECONDS, HostBeats, HostWatch
from ultraep_serve.config import BalanceConfig
from ultraep_serve.engines.common.cpu_experts import most_tokens
from ultraep_serve.engines.common.run import meet
from ultraep_serve.engines.common.tuned_kernels import use_tuned_kernels
from ultraep_serve.errors import ConfigError, SelfCheckError, UnsupportedError
from ultraep_serve.proof.answers import Answers
from ultraep_serve.proof.samples import Sampled
from ultraep_serve.system.environment import first_process
from ultraep_serve.system.machine import available_memory
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

    layers: Sequence[Layer]
    parameters: Sequence[Sequence[nn.Parameter]]  # those (L, ...) that make up a layer's experts
    shared: Sequence[SharedValues | UnsupportedError]  # what experts of a layer have in common
    shape: ExpertShape
    view: TokenView
    experts_per_token: int  # K
    hidden_size: int  # H
    dtype: torch.dtype  # of the layers' input and output
    largest_batch: int | None  # tokens over all ranks; None: the engine sets no bound


class Execution(ABC, Generic[Layer]):
    """How an engine computes layers; all ranks call it alike."""

    @abstractmethod
    def resize(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        before: int,
        after: int,
    ) -> None:
        """Have ``layers`` serve ``after`` physical experts on this rank instead of ``before``.

        With slots, ids are physical, and the layers' dispatch is balanced. ``parameters`` have rows
        for the masters alone meanwhile. Raises UnsupportedError.
        """

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

    Slots are taken back where that fails. All ranks call this together. Raises UnsupportedError,
    and what ``BalancedLayers`` raises.
    """
    layers, parameters, shape = loaded.layers, loaded.parameters, loaded.shape
    assert own.group is not None, "engines have a group of all ranks"
    _require_large_batches(config, loaded.largest_batch)
    require_agreement(loaded.shared, own.group.on_host, config)
    answers = _answers(execution, loaded, own.rank)
    run_layer = functools.partial(_run_first_layer, execution, loaded)
    largest = loaded.largest_batch and loaded.largest_batch * loaded.experts_per_token
    try:
        execution.resize(layers, parameters, shape.num_masters, shape.num_local)
        balanced = BalancedLayers(
            config, shape, loaded.view, parameters, run_layer, own, answers=answers, largest=largest
        )
    except UnsupportedError:
        for of_layer in parameters:  # masters that have been moved stay where they are
            for parameter in of_layer:
                parameter.data = parameter.data[: shape.num_masters]
        execution.resize(layers, parameters, shape.num_local, shape.num_masters)
        raise
    balanced.hold(layers, execution.kernel)
    flow.balancer = balanced.balancer
    return balanced


def _require_large_batches(config: BalanceConfig, largest_batch: int | None) -> None:
    """Raise UnsupportedError where even the largest batch is left alone, as decode is.

    It has ``largest_batch`` tokens over all ranks; None: the engine sets no bound.
    """
    if largest_batch is not None and largest_batch < config.min_batch_tokens:
        raise UnsupportedError(
            f"no batch has --min-batch-tokens {config.min_batch_tokens} tokens: the largest that "
            f"the engine schedules has {largest_batch} over all ranks; choose --min-batch-tokens "
            f"{largest_batch} or less"
        )


def _answers(execution: Execution[Layer], loaded: LoadedLayers[Layer], rank: int) -> Answers:
    def compute(
        index: int, x: torch.Tensor, weights: torch.Tensor, physical: torch.Tensor
    ) -> torch.Tensor:
        # kernels may write their output into x, or empty it
        return execution.compute(loaded.layers[index], x.clone(), weights, physical)

    return Answers(
        compute=compute,
        experts_per_token=loaded.experts_per_token,
        hidden_size=loaded.hidden_size,
        dtype=loaded.dtype,
        device=loaded.parameters[0][0].device,
        seed=rank if loaded.view is TokenView.OWN else 0,
    )


def _run_first_layer(
    execution: Execution[Layer], loaded: LoadedLayers[Layer], num_assignments: int
) -> None:
    """Compute a batch that gives every rank's masters so many assignments, for the cost model.

    All of its tokens are alike. On a device the batch is launched, and nobody waits for it.
    """
    device, shape = loaded.parameters[0][0].device, loaded.shape
    seen = num_assignments * (shape.num_ranks if loaded.view is TokenView.SHARED else 1)
    ids = balanced_ids(shape, seen, loaded.experts_per_token, device)
    x = torch.ones((ids.shape[0], loaded.hidden_size), dtype=loaded.dtype, device=device)
    execution.compute(loaded.layers[0], x, torch.ones(ids.shape, device=device), ids)


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
        batch, see ``GroupSetup.why_never_balanced``. Returns when all ranks have come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags, there is not one speed per rank, or
        a CPU host has too little memory for the largest batch,
        PeerTimeoutError when a rank does not come, SelfCheckError on all ranks when one computes
        what it should not.
        """
        fixed_speeds(config.speeds, shape.num_ranks)
        self._own, self._layers, self._answers = own, layers, answers
        self._in_place: list[_InPlace] = []
        self._setup = self._meet(config, shape, view)
        if layers[0][0].device.type == "cuda":
            use_tuned_kernels(own.engine, shape.num_slots, RunFiles(self._run_path).tuned)
        backend = make_backend(layers[0][0].device, self._setup)
        for parameters in layers:
            _adopt(parameters, backend)
        self._slot_bytes = backend.slot_bytes
        page = self._connect(backend)
        self._require_memory(largest)
        self._costs = backend.calibrate(run_layer)
        if page is not None and own.pipeline.number == 0:
            RunFiles(self._run_path).write_costs(self._costs)
        proof = _proof_of(backend)
        self.self_check = self._check_itself(proof, backend)
        if reason := self._setup.why_never_balanced(self._costs, largest):
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
        return GroupSetup(config, shape, view, location, own.group)

    def _connect(self, backend: Backend) -> ControlPage | None:
        """Reach the other ranks, and watch them; returns the control page, which one rank has."""
        config, page = self._setup.config, None
        if self._setup.location.is_host_primary:
            page = ControlPage.create(self._run_path, config.policy, allow_ideal=config.allow_ideal)
        self._recorder = self._create_recorder()
        if page is not None:
            self._recorder.watch(page.file)
        backend.connect()
        wait_for_all(self._setup)
        self._watch = self._watch_hosts()
        return page

    def _sampled(self) -> Sampled | None:
        own, setup = self._own, self._setup
        if not setup.config.verify_every:
            return None
        number = own.pipeline.number * setup.shape.num_ranks + setup.location.rank
        path = RunFiles(self._run_path).verification(number)
        return Sampled(self._layers, self._answers, path, lambda: versions_here(own.engine))

    def _create_recorder(self) -> Recorder:
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
        # Before the run directory is left.
        Finalize(None, recorder.close, exitpriority=1)
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

    def _require_memory(self, largest: int | None) -> None:
        """Raise ConfigError, on all ranks, where CPUs lack memory to compute the largest batch.

        ``largest`` in assignments over all ranks. Counted is what experts need at least, beside all
        that is there by now. On GPUs engines try their largest at start.
        """
        answers, setup = self._answers, self._setup
        if answers is None or largest is None or answers.device.type != "cpu":
            return
        free = available_memory()
        left = sys.maxsize if free is None else free // setup.location.host_size
        left -= self._own.cache_bytes
        if group := setup.engine_group:  # also of hosts that cannot tell
            ranks = HostAllGather(group.on_host, setup.connect_seconds)
            left = int(ranks.gather(np.array([left])).min())
        top_k, hidden = answers.experts_per_token, answers.hidden_size
        sources = setup.shape.num_ranks if setup.view is TokenView.OWN else 1
        tokens = largest // top_k // sources
        most = most_tokens(left, hidden, top_k, answers.dtype) // sources
        if tokens > most:
            fits = f"{most} or less" if most > 0 else "less by far, or a smaller cache"
            raise ConfigError(
                f"experts need more memory for a batch of {tokens} tokens than is left; choose "
                f"--max-num-batched-tokens (SGLang: --chunked-prefill-size) {fits}"
            )

    def _watch_hosts(self) -> HostWatch:
        """Watch other hosts, whose ranks may still load: this is not the end of it."""
        setup, location, beats = self._setup, self._setup.location, None
        num_hosts = location.num_ranks // location.host_size * self._own.pipeline.num_stages
        store = None if setup.engine_group is None else setup.engine_group.store
        if num_hosts > 1 and location.is_host_primary and store is not None:
            beats = HostBeats(store, location, self._own.pipeline)
        files = RunFiles(self._run_path)
        seconds, server = setup.connect_seconds, first_process()
        watch = HostWatch(files, self._recorder, seconds, beats, server)
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
        if self._setup.engine_group is not None:  # where a host is lost, the watch speaks first
            self._setup.engine_group.bound_waits(seconds + WATCH_SECONDS)
        if self._setup.location.is_host_primary:
            logger.info("ultraep: loading has ended; ranks wait %g s for each other", seconds)

    @property
    def num_layers(self) -> int:
        """How many layers are balanced on this rank."""
        return len(self._layers)

    def hold(self, layers: Sequence[Layer], kernel: Callable[[Layer], object]) -> None:
        """Remember where the experts of ``layers`` are, and what computes them."""
        own = zip(layers, self._layers, strict=True)
        self._in_place = [
            _InPlace(layer, parameters, functools.partial(kernel, layer))
            for layer, parameters in own
        ]

    def require_in_place(self) -> None:
        """Raise UnsupportedError where the experts of a layer were replaced; before every batch."""
        for layer in self._in_place:
            layer.require()

    def _log_ready(self, logger: logging.Logger) -> None:
        setup, location = self._setup, self._setup.location
        domains = stage = ""
        if self._own.pipeline.num_stages > 1:
            stage = f" of pipeline stage {self._own.pipeline.number}"
        if location.num_domains > 1:
            domains = f" in {location.num_domains} domains of {location.domain_size}"
        logger.info(
            "ultraep: balancing %d MoE layers%s over %d ranks (%s parallel)%s, "
            "%d replica slots per rank = %.1f MiB reserved, policy %s",
            len(self._layers),
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
            if check.detail:
                passed = f"passed in {check.seconds:.1f} s: {check.detail}"
                logger.info("ultraep: self-check %s %s", check.name, passed)
            if check.warning:
                logger.warning("ultraep: self-check %s: %s", check.name, check.warning)


class _InPlace:
    """Whether a layer's experts are still those that have slots behind them.

    Engines can load weights anew while they serve. What is loaded into the same memory is balanced
    as it is; what is made anew has no slots.
    """

    def __init__(
        self, layer: nn.Module, parameters: Sequence[nn.Parameter], kernel: Callable[[], object]
    ) -> None:
        """``parameters`` of ``layer`` have slots; ``kernel`` says what computes it."""
        self._name = getattr(layer, "layer_name", type(layer).__name__)
        self._held, self._kernel = layer._parameters, kernel
        movable = {id(parameter) for parameter in parameters}
        self._names = [name for name, own in self._held.items() if id(own) in movable]
        self._expected = self._now()

    def require(self) -> None:
        """Raise UnsupportedError if one was replaced."""
        if self._now() != self._expected:
            raise UnsupportedError(
                f"{self._name} is not balanced: its weights were replaced after loading; "
                "start the server anew",
                otherwise="",
            )

    def _now(self) -> list[int]:
        found = (self._held.get(name) for name in self._names)
        addresses = [0 if own is None else own.data_ptr() for own in found]
        return [id(self._kernel()), *addresses]


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
