"""Measures a running server over HTTP, whatever engine it is. Read ``prefill`` first.

Needs httpx, rich and numpy (``pip install ultraep-serve[client]``), never torch or an engine.
"""
