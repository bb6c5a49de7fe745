"""What every rank did, in shared memory: written on the hot path, readable by the same user.

``recorder`` writes the layout of ``ring``, ``reader`` reads it; ``control`` carries the policy in
the other direction. Needs only NumPy and the standard library.
"""
