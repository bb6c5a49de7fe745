"""Proof on the machine that serves: ``start`` before the first request, ``samples`` after it."""
