"""The flow of a batch, and who takes part in it; ``host`` and ``cuda`` are twins."""
