"""One error tree; every message says what is legal and what to do next.

UltraEPError
├── ConfigError       a setting is wrong: fix the flag or the file it names
├── UnsupportedError  the engine, model or layer cannot be balanced
├── DeviceError       the GPU's driver refused a call that should have worked
├── EngineEndedError  the engine ended by itself: read its log, start it again
└── FabricError       ranks could not reach each other
    └── PeerTimeoutError  a rank stopped answering: restart the engine
"""

__all__ = [
    "ConfigError",
    "DeviceError",
    "EngineEndedError",
    "FabricError",
    "PeerTimeoutError",
    "UltraEPError",
    "UnsupportedError",
]


class UltraEPError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(UltraEPError, ValueError):
    """A setting is out of range or contradicts another; the message names the legal values."""


class UnsupportedError(UltraEPError):
    """This engine, model or layer cannot be balanced; the message names the remedy.

    Start with ``--on-unsupported=off`` to serve without balancing instead.
    """


class DeviceError(UltraEPError):
    """The CUDA driver refused a call; the message names both. Look at the driver's log (dmesg)."""


class EngineEndedError(UltraEPError):
    """The engine's server ended without having been asked to; usually a rank was lost."""


class FabricError(UltraEPError):
    """Ranks of one expert-parallel group could not set up or use their shared memory."""


class PeerTimeoutError(FabricError):
    """A rank did not answer within ``timeout_seconds``. The engine must be restarted."""
