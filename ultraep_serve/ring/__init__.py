"""What every rank did, in shared memory: written on the hot path, read by anyone of the same user.

``recorder`` writes what ``schema`` lays out, ``reader`` reads it; ``control`` carries the policy
the other way, ``spool`` holds recorded routing. Needs only NumPy and the standard library.
"""
