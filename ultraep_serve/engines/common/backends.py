"""What balances experts, and what proves that, by where they are: in host memory, or on a GPU.

What is for GPUs needs Triton, and is imported only there.
"""

from collections.abc import Callable
from typing import Any

import torch

from ultraep_serve.balance.backend import Backend, GroupSetup
from ultraep_serve.balance.memory import HandleKind
from ultraep_serve.errors import UnsupportedError


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
    from ultraep_serve.balance.cuda.backend import DeviceBackend
    from ultraep_serve.balance.cuda.driver import open_driver

    index = torch.cuda.current_device() if device.index is None else device.index
    kind = HandleKind.FABRIC if location.spans_hosts else HandleKind.FILE_DESCRIPTOR
    return DeviceBackend(setup, open_driver(index, kind))


def proof_of(backend: Backend) -> tuple[Callable[[Any], Any], type[Any]]:
    """Stages and samples of ``backend``."""
    from ultraep_serve.balance.host.backend import HostBackend

    if isinstance(backend, HostBackend):
        from ultraep_serve.proof import host

        return host.stages_of, host.HostSamples
    from ultraep_serve.proof import device

    return device.stages_of, device.DeviceSamples
