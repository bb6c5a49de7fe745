"""What every rank did, in shared memory: written on the hot path, readable by the same user.

``recorder`` writes the layout of ``schema``, ``reader`` reads it; ``control`` carries the policy in
the other direction, ``spool`` holds recorded routing. Needs only NumPy and the standard library.
"""
