"""Balancing where experts live in NVIDIA GPUs' memory; names as in ``host`` are of twins.

``driver`` holds the calls of CUDA's virtual memory API that ``balance.memory`` keeps in order.
"""
