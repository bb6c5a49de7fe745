"""numba: what a CPU rank runs, and the twin of the Triton kernel of the same name in ``device``.

Compiled on the first call, without the interpreter lock. -1 in ids is always padding.
"""
