"""Recorded routing of a real model, which lies beside the checkout and is no part of it."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_real_traces = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="real traces are kept out of the project"
)
