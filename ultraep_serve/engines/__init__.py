"""Adapters: what hooks balancing into an engine. ``common`` is for every engine, the rest for one each."""
