"""Puts the checkout on the path: benchmarks share ``tests.support`` with the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
