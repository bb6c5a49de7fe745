"""Balancing where experts live in NVIDIA GPUs' memory: the same names as in ``host``.

``driver`` holds the calls of CUDA's virtual memory API that are used, ``memory`` keeps them in
order, ``rendezvous`` is how ranks hand each other their memory.
"""
