"""Puts the checkout on the path: these checks share ``tests.support`` and the lab with others."""

import sys
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[1:3])
