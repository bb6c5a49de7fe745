"""Stands in for torchvision where it is not installed: importable, but without image functions."""

__version__ = "0"
