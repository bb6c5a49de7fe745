"""Device code of ultraep_serve, one file per verb: count, exchange, stream, reroute.

Each verb has a CPU kernel (numba, compiled, without the interpreter lock) and a torch twin short
enough to check by eye. Needs numpy, numba and torch only. -1 in ids is always padding.
"""
