"""Packages that a process does not find, though they are installed."""

from pathlib import Path


def hide(folder: Path, *packages: str) -> None:
    """From processes whose ``PYTHONPATH`` begins with ``folder``."""
    for package in packages:
        (folder / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package} here')\n")
