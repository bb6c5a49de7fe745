"""Which backend balances: by where experts live."""

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
    # Only here: needs Triton, which a host without a GPU may do without.
    from ultraep_serve.balance.cuda.backend import DeviceBackend
    from ultraep_serve.balance.cuda.driver import open_driver

    index = torch.cuda.current_device() if device.index is None else device.index
    kind = HandleKind.FABRIC if location.spans_hosts else HandleKind.FILE_DESCRIPTOR
    return DeviceBackend(setup, open_driver(index, kind))
