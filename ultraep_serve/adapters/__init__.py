"""Adapters: the only packages that import an engine, one package each."""
