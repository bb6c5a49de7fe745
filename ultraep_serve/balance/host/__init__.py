"""Balancing where experts live in host memory."""
