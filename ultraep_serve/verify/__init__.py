"""Proof on the machine that serves: ``self_check`` before the first request."""
