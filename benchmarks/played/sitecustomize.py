"""On PYTHONPATH, with the checkout: every process sees the instruction set that is played.

Python imports this module first. ``tests.support.instruction_sets`` says which set, once torch is
there; the switches of oneDNN, ATen and MKL come beside it (``benchmarks/expert_kernels.py``).
"""

import importlib

from benchmarks.after_import import after_import

after_import("torch", lambda _: importlib.import_module("tests.support.instruction_sets"))
