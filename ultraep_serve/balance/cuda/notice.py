"""Says why a device has stopped, where the engine only sees that it has."""

import logging
from dataclasses import dataclass

from ultraep_serve.balance.cuda.fabric import DeviceFabric
from ultraep_serve.telemetry.recorder import Recorder

__all__ = ["StopNotice"]

_LOGGER = logging.getLogger(__name__)


@dataclass
class StopNotice:
    """To be called at every heartbeat, and when the process ends."""

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
