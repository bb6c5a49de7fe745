"""Planner: pure integer functions from loads to a plan, the same on every rank."""
