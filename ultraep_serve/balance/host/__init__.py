"""Balancing where experts live in host memory: the same names as in ``cuda``."""
