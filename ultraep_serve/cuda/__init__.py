"""Replica slots and rank-to-rank memory on CUDA, through its virtual memory API.

``driver`` is the few calls that are used of it, ``mapping`` keeps them in order, ``slots`` and
``fabric`` are the twins of the host's, ``meeting`` is how ranks hand each other their memory.
"""
