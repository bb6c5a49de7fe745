"""Adapters: the only packages that import an engine, one each; ``common`` is for all of them."""
