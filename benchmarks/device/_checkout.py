"""Puts the checkout on the path: these checks share ``tests.support`` with the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
