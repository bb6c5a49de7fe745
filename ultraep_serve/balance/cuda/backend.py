"""Balancing where experts live in GPU memory."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.util import Finalize

import numpy as np
import torch
from ultraep_kernels.device.count import Count
from ultraep_kernels.device.plan import Given, Planner, Rows, Sender, plan_sizes
from ultraep_kernels.device.relays import has_relays
from ultraep_kernels.device.stream import Programs

from ultraep_serve.balance.backend import Backend, GroupSetup, row_width
from ultraep_serve.balance.collectives import DeviceAllGather, gather_bytes
from ultraep_serve.balance.cuda.balancer import DeviceBalancer
from ultraep_serve.balance.cuda.fabric import MOST_CHUNK_BYTES, DeviceFabric, Limits
from ultraep_serve.balance.cuda.timing import device_seconds, replayed_seconds
from ultraep_serve.balance.memory import Driver
from ultraep_serve.balance.rendezvous import GatherRendezvous, Rendezvous, SocketRendezvous
from ultraep_serve.balance.slots import LayerSlots, SlotPool
from ultraep_serve.costs.calibration import Probes, probe_loads
from ultraep_serve.telemetry.recorder import Recorder

_LOGGER = logging.getLogger(__name__)

LEFT_FREE = 32  # multiprocessors: as many as NCCL's collectives take; DeepEP's dispatch takes 24

_SENDERS = 32  # programs that send experts beside the engine's dispatch
_COMPILE_SECONDS = 600.0  # that a rank may need before it serves, with nothing in its caches
_ROWS_PER_MASTER = (1024, 2048, 4096)  # beyond the roofline's ridge, where reading weights ends


class DeviceBackend(Backend):
    """Of ranks with a GPU each, found in the run directory, between hosts through the engine."""

    balancer_class = DeviceBalancer
    fabric: DeviceFabric

    def __init__(self, setup: GroupSetup, driver: Driver) -> None:
        per_layer = setup.config.slot_memory == "per_layer"
        chunk_bytes = min(setup.chunk_bytes, MOST_CHUNK_BYTES)
        super().__init__(setup, SlotPool(driver, setup.shape.num_slots, chunk_bytes, per_layer))
        self._device = driver.device

    def connect(self) -> None:
        setup, location = self.setup, self.setup.location
        may_relay = has_relays(setup.relay, location.domain_size)
        limits = Limits(
            row_width=row_width(setup.shape.num_logical_experts, setup.view),
            max_chunks=max(layer.chunks.shape[0] for layer in self.layers),
            patience_ns=round(setup.config.timeout_seconds * 1e9),
            programs=num_programs(_multiprocessors(self._device), _SENDERS, may_relay),
        )
        all_gather = None
        if location.num_domains > 1:
            assert setup.engine_group is not None, "several domains are found through the group"
            all_gather = DeviceAllGather(setup.engine_group.on_device)
        self.fabric = DeviceFabric(self._pool, self._rendezvous(), location, limits, all_gather)
        self._undo.callback(self.fabric.close)
        self.fabric.wait_at_least(_COMPILE_SECONDS)

    @property
    def neighbours(self) -> Mapping[int, int]:
        return self.fabric.processes

    def _rendezvous(self) -> Rendezvous:
        """Return the way to find the domain: the run directory, or the engine between hosts."""
        setup, location = self.setup, self.setup.location
        domain = location.domain
        if location.spans_hosts:
            assert setup.engine_group is not None, "hosts are found through the group"
            group, seconds = setup.engine_group.on_host, setup.connect_seconds
            return GatherRendezvous(
                location.rank,
                domain,
                lambda mine: gather_bytes(group, mine, seconds)[domain.start : domain.stop],
            )
        return SocketRendezvous(setup.run_path, location.rank, domain, setup.connect_seconds)

    def _warm_up(self, balancer: DeviceBalancer, recorder: Recorder) -> None:
        balancer.warm_up()
        notice = StopNotice(self.fabric, recorder)
        recorder.at_heartbeat(notice)
        Finalize(None, notice, exitpriority=3)  # before the engine's error is published as a reason

    def _probes(self, layer: LayerSlots) -> Probes:
        """Return probes timed on the device; small stages run in CUDA graphs, free of the host."""
        shape, device, fabric = self.setup.shape, self._device, self.fabric
        row = torch.zeros(fabric.limits.row_width, dtype=torch.int32, device=device)
        loads = torch.from_numpy(probe_loads(shape)).int().to(device)
        no_ids = torch.zeros(0, dtype=torch.int32, device=device)
        sizes = shape.num_ranks, shape.num_logical_experts, shape.num_replica_slots
        planner = Planner(
            plan_sizes(*sizes, self.setup.location.domain_size),
            Given(Rows.of(loads), fabric.status),
            Sender(source=0),
        )
        counted = Count(shape.num_logical_experts, device)
        return Probes(
            seconds=lambda action: device_seconds(device, action),
            exchange=lambda: replayed_seconds(device, lambda: fabric.exchange(row)),
            send_expert=lambda: replayed_seconds(device, self._sender(layer)),
            plan=lambda: replayed_seconds(device, lambda: planner(no_ids, no_ids, counted)),
            gather=fabric.gathered,
            bytes_before_relay=fabric.limits.programs.senders * int(layer.chunks[:, 3].max()),
            rows_per_master=_ROWS_PER_MASTER,
        )

    def _sender(self, layer: LayerSlots) -> Callable[[], object]:
        """Return what has every rank send an expert to the one before it in its domain.

        Without slots it copies one in place.
        """
        shape = self.setup.shape
        if not shape.num_replica_slots:
            return lambda: [tensor[0].copy_(tensor[0].clone()) for tensor in layer.tensors]
        slot_expert = np.full((shape.num_ranks, shape.num_slots), -1, np.int32)
        ranks = np.arange(shape.num_ranks).reshape(-1, self.setup.location.domain_size)
        slot_expert[:, 0] = np.roll(ranks, -1, axis=1).reshape(-1) * shape.num_masters
        on_device = torch.from_numpy(slot_expert).to(self._device)
        sends = self.fabric.sends(on_device, shape.num_masters, "never")
        stream = self.fabric.stream(on_device, shape.num_masters, sends)
        chunks = self.fabric.chunks(layer)
        return lambda: stream.send(chunks)


@dataclass(eq=False)  # a heartbeat's function, which has a hash
class StopNotice:
    """Says why a device has stopped, where the engine only sees that it has.

    To be called at every heartbeat, and when the process ends.
    """

    fabric: DeviceFabric
    recorder: Recorder
    _is_given: bool = False

    def __call__(self) -> None:
        """Log, and publish on the ring, which wait was given up; once."""
        reason = self.fabric.lost_peers
        if reason and not self._is_given:
            self._is_given = True
            self.recorder.fail(reason)
            _LOGGER.error("ultraep: %s; errors of CUDA follow from it", reason)


def num_programs(multiprocessors: int, wanted: int, may_relay: bool) -> Programs:
    """Programs that send experts, ``wanted`` at most, and as many that relay where any plan does.

    Each takes a multiprocessor. LEFT_FREE of them are left to others, where there are more.
    """
    most = (multiprocessors - LEFT_FREE) // (2 if may_relay else 1)
    number = max(1, min(wanted, most))
    return Programs(number, number if may_relay else 0)


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return LEFT_FREE + 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
