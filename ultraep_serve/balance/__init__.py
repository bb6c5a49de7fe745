"""The flow of a batch: ``host`` and ``cuda`` are twins; topology, collectives, and who is still there."""
