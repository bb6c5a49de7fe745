"""Measures a running server over HTTP, whatever engine it is. Read ``prefill`` first.

Needs httpx, rich and numpy (the extra ``client``), never torch or an engine.
"""
