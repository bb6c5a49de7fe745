"""Adapters: the only rooms that import an engine, one room each."""
