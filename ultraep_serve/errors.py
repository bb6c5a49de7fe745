"""One error tree; every message says which values are valid and what to do next."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultraep_serve.types import CheckResult

# Remedies; the first two always work: once an engine is being started, and before.
SERVE_UNBALANCED = "set on_unsupported to off to serve without balancing"
POLICY_OFF = "serve with --policy off"
TRY_NEWER = "set on_newer_engine to try"
MORE_SHARED_MEMORY = (
    "give /dev/shm more room: docker run --shm-size=2g, in Compose shm_size: 2gb, in Kubernetes an "
    "emptyDir of medium Memory mounted there"
)


class UltraEPError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(UltraEPError, ValueError):
    """A setting is out of range or contradicts another; the message names the valid values."""


class UnsupportedError(UltraEPError):
    """This engine, model or layer cannot be balanced; the message ends with a remedy.

    ``problem`` may name one of its own after a semicolon. ``otherwise`` follows it: by default that
    is ``on_unsupported``, with which the engine serves without balancing instead; it is empty where
    nothing else helps.
    """

    def __init__(self, problem: str, *, otherwise: str = SERVE_UNBALANCED) -> None:
        super().__init__(problem)
        self.problem, self.otherwise = problem, otherwise

    def __str__(self) -> str:
        if not self.otherwise:
            return self.problem
        return self.problem + (", or " if "; " in self.problem else "; ") + self.otherwise


class SelfCheckError(UnsupportedError):
    """What this machine computes is not what it should; the message names the check and the rank.

    Report it, with the log of every rank.
    """

    def __init__(
        self,
        problem: str,
        results: "Sequence[CheckResult]" = (),
        *,
        otherwise: str = SERVE_UNBALANCED,
    ) -> None:
        """``results`` of the checks up to the one that failed."""
        super().__init__(problem, otherwise=otherwise)
        self.results = tuple(results)


class DeviceError(UltraEPError):
    """The CUDA driver refused a call; the message names both. Look at the driver's log (dmesg)."""


class FabricError(UltraEPError):
    """Ranks of one expert-parallel group could not set up or use their shared memory."""


class PeerTimeoutError(FabricError):
    """A rank did not answer within ``timeout_seconds``. The engine must be restarted."""


class RingError(UltraEPError):
    """A ring could not be created or is not one this version reads; the message names the file."""


class ControlError(UltraEPError):
    """The control page is missing or not one this version reads; the message names the file."""


class OutputError(UltraEPError):
    """A file cannot be written; the message names it."""


class SharedMemoryError(UltraEPError, OSError):
    """Another process locks shared memory, so that nothing can start; the message names it."""


class NoServerError(UltraEPError):
    """No balanced server runs here, or several do; the message says how to start or choose one."""
