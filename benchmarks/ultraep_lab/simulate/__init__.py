"""Thousands of ranks with the real planner: traffic, layers, and what comes of them."""
