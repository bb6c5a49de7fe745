"""The HTTP server beside the engine: metrics, balance, readiness and the policy switch.

A process of its own that only reads shared memory: it never imports torch, and neither its load nor
its death touches the engine.
"""

from ultraep_serve.sidecar.app import create_app
from ultraep_serve.sidecar.serve import serve

__all__ = ["create_app", "serve"]
