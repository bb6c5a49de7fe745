"""Real-time expert load balancing for Mixture-of-Experts serving.

Read ``balance.host.balancer`` first: its ``route`` method is the whole data flow, one line per
stage. What predicts and measures is in the package ``ultraep_lab``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ultraep_serve.sidecar.direct import status

__all__ = ["__version__", "status"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import ``status`` when it is asked for, so that importing this package stays light."""
    if name == "status":
        from ultraep_serve.sidecar.direct import status

        return status
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
