"""The HTTP server beside the engine: metrics, balance, readiness and the policy switch.

It is a process of its own that only reads shared memory: it never imports torch, and neither its
load nor its failure affects the engine.
"""
