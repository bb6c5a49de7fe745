"""What every adapter does once its engine has loaded a model; knows no engine.

The MoE layers of one process are taken over together: the ranks find out how they lie on hosts,
their expert tensors move in front of the replica slots, the ranks connect, and from then on one
balancer routes all of them.
"""

import logging
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ultraep_serve import __version__
from ultraep_serve.backend import CONNECT_FACTOR, Backend, GroupSetup, make_backend
from ultraep_serve.collectives import EngineGroup, HostAllGather
from ultraep_serve.config import BalanceConfig, first_process
from ultraep_serve.cuda.recording import is_capturing
from ultraep_serve.errors import (
    SERVE_UNBALANCED,
    ConfigError,
    FabricError,
    UltraEPError,
    UnsupportedError,
)
from ultraep_serve.files import write_whole
from ultraep_serve.launcher.sidecar import start_beside_rank
from ultraep_serve.physical import identity_table
from ultraep_serve.ring.control import ControlPage
from ultraep_serve.ring.recorder import Recorder
from ultraep_serve.ring.run_directory import (
    CONFIG_FILE,
    SHARED_MEMORY,
    UNBALANCED_FILE,
    RunDirectory,
    name_of_run,
)
from ultraep_serve.ring.schema import RingState
from ultraep_serve.ring.spool import SpoolSource, SpoolWriter
from ultraep_serve.topology import Location, host_identity, locate
from ultraep_serve.types import ExpertShape, TokenView

__all__ = [
    "BalancedLayers",
    "Batch",
    "balanced_ids",
    "expert_parameters",
    "find_location",
    "meet",
    "require_one_number",
    "serve_unbalanced",
    "wait_for_all",
]


@dataclass(frozen=True)
class Batch:
    """The batch, or the micro-batch, that a layer is called for."""

    tokens: int  # over all ranks, padding included, the same on every rank
    request_tokens: int | None = None  # this rank's first rows that belong to requests; None: all
    micro_batch: int = 0  # numbered from 0; the next may be routed before this one is computed


class BalancedLayers:
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
        make_backend: Callable[[torch.device, GroupSetup], Backend] = make_backend,
    ) -> None:
        """``layers`` in the order they run, each the tensors (L, ...) that make up its experts.

        The parameters become (L + S, ...) in place. ``run_layer`` computes the first layer
        for a batch that gives every rank's masters so many assignments, to be timed; all ranks
        call it together. ``group`` is the engine's, of all ranks; without it they share this host.
        Returns when all ranks have come this far.
        Raises UnsupportedError for tensors that cannot be moved and for ranks that form no domains,
        ConfigError where hosts were started with other flags, PeerTimeoutError when a rank does not
        come.
        """
        location = find_location(config, rank, shape.num_ranks, group)
        config = meet(config, location, group)
        self._setup = setup = GroupSetup(config, shape, view, location, group)
        self._num_layers = len(layers)
        backend = make_backend(layers[0][0].device, setup)
        for parameters in layers:
            _adopt(parameters, backend)
        self._slot_bytes = backend.slot_bytes
        if location.is_host_primary:
            ControlPage.create(config.run_path, config.policy).close()
        self._recorder = self._create_recorder(engine)
        backend.connect()
        wait_for_all(setup)
        self._control = control = ControlPage.open(config.run_path)
        primary = location.is_host_primary
        self._recorder.at_heartbeat(lambda: control.follow(put_back=primary))
        self._spool = self._create_spool(engine)
        self._costs = backend.calibrate(run_layer)
        policies = self._control if rank == 0 else None
        self._balancer = backend.make_balancer(policies, self._recorder, self._costs)

    @property
    def location(self) -> Location:
        """Where this rank is among all ranks."""
        return self._setup.location

    def _create_recorder(self, engine: str) -> Recorder:
        setup, config = self._setup, self._setup.config
        recorder = Recorder.create(
            run_path=config.run_path,
            rank=setup.location.rank,
            shape=setup.shape,
            num_layers=self._num_layers,
            ring_records=config.ring_records,
            engine=engine,
            mode=setup.view.value,
            slot_bytes=self._slot_bytes,
            timeout_seconds=config.timeout_seconds,
            location=setup.location,
        )
        recorder.set_policy(config.policy)  # until a batch says otherwise
        return recorder

    def _create_spool(self, engine: str) -> SpoolWriter | None:
        """Where all ranks see the same tokens, one records them.

        Layers of overlapping micro-batches come mixed, which a recording has no place for.
        """
        setup, rank = self._setup, self._setup.location.rank
        is_shared = setup.view is TokenView.SHARED
        if (is_shared and rank != 0) or setup.shape.num_micro_batches > 1:
            return None
        source = SpoolSource(
            rank=rank,
            num_ranks=setup.shape.num_ranks,
            num_layers=self._num_layers,
            num_experts=setup.shape.num_logical_experts,
            min_batch_tokens=setup.config.min_batch_tokens,
            is_shared=is_shared,
            engine=engine,
        )
        return SpoolWriter(setup.config.run_path, source)

    def mark_ready(self) -> None:
        """Say that this rank balances; the launcher and the sidecar wait for it."""
        self._recorder.set_state(RingState.READY)

    def route(self, layer: int, topk_ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Physical ids for ``topk_ids`` (T, K) of ``layer``, of the same type.

        ``LayerBalancer.route``; an error also marks this rank as failed for the sidecar. While
        a recording runs, the ids of requests are recorded; on a GPU that waits for the device.
        """
        if self._spool is not None and not is_capturing(topk_ids.device):
            if layer == 0:
                self._spool.begin(self._control.recording_word, batch.tokens)
            if self._spool.is_recording:
                self._spool.add(layer, topk_ids[: batch.request_tokens].cpu().numpy())
        try:
            physical = self._balancer.route(layer, topk_ids, batch.tokens, batch.micro_batch)
        except UltraEPError:
            self._recorder.set_state(RingState.FAILED)
            raise
        return physical.to(topk_ids.dtype)

    def computed(self, micro_batch: int = 0) -> None:
        """``LayerBalancer.computed``: the engine has finished the layer that was routed last."""
        self._balancer.computed(micro_batch)

    def log_ready(self, logger: logging.Logger) -> None:
        """For the operator: what balances here, and by which costs it decides."""
        setup, location = self._setup, self._setup.location
        domains = ""
        if location.num_domains > 1:
            domains = f" in {location.num_domains} domains of {location.domain_size}"
        logger.info(
            "ultraep: balancing %d MoE layers over %d ranks (%s parallel)%s, "
            "%d replica slots per rank = %.1f MiB reserved, policy %s",
            self._num_layers,
            setup.shape.num_ranks,
            setup.view.value,
            domains,
            setup.shape.num_slots,
            self._slot_bytes / 2**20,
            setup.config.policy.value,
        )
        logger.info("ultraep: costs %s", self._costs.to_json())
        if location.domain_size == 1:
            logger.warning(
                "ultraep: every domain has one rank, so there is nowhere to copy experts to; start "
                "more ranks by one ultraep-serve, or choose a larger --domain-size"
            )


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
                f"moved; {SERVE_UNBALANCED}"
            )
    return found


def _adopt(parameters: Sequence[nn.Parameter], backend: Backend) -> None:
    slots = backend.adopt([parameter.data for parameter in parameters])
    for parameter, alias in zip(parameters, slots.tensors, strict=True):
        parameter.data = alias  # at once: what it held may be empty now


_OF_ONE_HOST = ("run_dir", "sidecar")  # settings that may differ from host to host
_NAME_BYTES = 64  # as long as Linux lets a host's name be


def find_location(
    config: BalanceConfig, rank: int, num_ranks: int, group: EngineGroup | None
) -> Location:
    """Where ``rank`` is; all ranks together. Without ``group`` all of them share this host.

    Raises UnsupportedError where ranks and hosts form no domains, ConfigError where hosts run
    different versions or were given different flags, PeerTimeoutError when a rank does not come.
    """
    if group is None:
        return locate(rank, [0] * num_ranks, config.domain_size, os.uname().nodename)
    ranks = HostAllGather(group.on_host, config.timeout_seconds * CONNECT_FACTOR)
    shared = Path(config.run_dir) if config.run_dir else SHARED_MEMORY
    identity = [host_identity(shared), _checksum(__version__)]
    hosts = ranks.gather(np.concatenate([identity, _host_name()]))  # so wide in every version
    if (strangers := np.flatnonzero(hosts[:, 1] != hosts[0, 1])).size:
        raise ConfigError(
            f"rank {strangers[0]} runs another version of ultraep_serve than rank 0 (rank {rank} "
            f"runs {__version__}); install the same one on every host"
        )
    settings = config.model_dump(mode="json", exclude=set(_OF_ONE_HOST))
    rows = ranks.gather(np.array([_checksum(value) for value in settings.values()], np.int64))
    for other, differs in enumerate(rows != rows[0]):
        if differs.any():
            name = list(settings)[int(differs.argmax())]
            raise ConfigError(
                f"rank {other} was started with another {name} than rank 0; start "
                "all hosts with the same settings"
            )
    name = hosts[0, 2:].tobytes().rstrip(b"\0").decode("ascii", "replace")
    return locate(rank, hosts[:, 0].tolist(), config.domain_size, name)


def meet(config: BalanceConfig, location: Location, group: EngineGroup | None) -> BalanceConfig:
    """``config`` with a run directory that all ranks of this host know; all ranks together.

    Without a launcher each host's primary rank makes one, which is gone with the host's last rank.
    Where it cannot be made, the primary rank raises ConfigError, and the others FabricError.
    """
    if config.run_dir:
        return config
    assert group is not None, "ranks without a group are given a run directory"
    process, number = first_process(), secrets.randbits(62)
    directory, problem = None, ""
    if location.is_host_primary:
        try:
            directory = _make_run_directory(config, name_of_run(process, number))
        except (OSError, UltraEPError) as error:  # the others wait for an answer
            process, problem = 0, str(error)
    ranks = HostAllGather(group.on_host, config.timeout_seconds * CONNECT_FACTOR)
    rows = ranks.gather(np.array([process, number], np.int64))
    process, number = rows[location.host.start].tolist()
    if problem:
        raise ConfigError(problem)
    if not process:
        first = location.host.start
        raise FabricError(f"rank {first} could not make a run directory; its log says why")
    if directory is None:
        directory = RunDirectory.join(name_of_run(process, number))
        _leave_at_exit(directory)
    return config.replace(run_dir=str(directory.path))


def serve_unbalanced(config: BalanceConfig, reason: str) -> None:
    """Leave ``reason``, why nothing is balanced, where the sidecar finds it; one rank calls this.

    Raises ConfigError where a sidecar that was asked for cannot listen.
    """
    path = Path(config.run_dir)
    if not config.run_dir:
        name = name_of_run(first_process(), secrets.randbits(62))
        path = _make_run_directory(config, name).path
    write_whole(path / UNBALANCED_FILE, " ".join(reason.split()).encode())


def _make_run_directory(config: BalanceConfig, name: str) -> RunDirectory:
    """One that this process leaves when it ends, and the sidecar, if that is asked for."""
    directory = RunDirectory.create(name)
    _leave_at_exit(directory)
    config = config.replace(run_dir=str(directory.path))
    write_whole(directory.path / CONFIG_FILE, config.to_json().encode())
    if config.sidecar is not None:
        start_beside_rank(config, config.sidecar)
    return directory


def _leave_at_exit(directory: RunDirectory) -> None:
    """``atexit`` is not called in a process of ``multiprocessing``."""
    Finalize(None, directory.leave, exitpriority=0)


def wait_for_all(setup: GroupSetup) -> None:
    """Return when all ranks of all domains have come this far; those of one are connected already.

    Raises PeerTimeoutError when a rank does not come.
    """
    group = setup.engine_group
    if group is not None and setup.location.num_domains > 1:
        HostAllGather(group.on_host, setup.connect_seconds).gather(np.zeros(1, np.int64))


def _host_name() -> NDArray[np.int64]:
    name = os.uname().nodename.encode("ascii", "replace")[:_NAME_BYTES]
    return np.frombuffer(name.ljust(_NAME_BYTES, b"\0"), np.int64)


def _checksum(value: object) -> int:
    return zlib.crc32(str(value).encode())


def require_one_number(num_experts: Collection[int]) -> None:
    """Raise UnsupportedError unless all layers have the same number of experts."""
    if len(numbers := set(num_experts)) > 1:
        raise UnsupportedError(
            f"MoE layers with different numbers of experts {sorted(numbers)} share no slots; "
            f"{SERVE_UNBALANCED}"
        )
