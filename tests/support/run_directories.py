"""The run directory of a server that this process stands in for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultraep_serve.config import BalanceConfig
from ultraep_serve.telemetry.run_directory import RunDirectory, name_of_run
from ultraep_serve.telemetry.run_files import RunFiles


@contextmanager
def run_directory() -> Iterator[Path]:
    """One that this process holds."""
    directory = RunDirectory.create(name_of_run(os.getpid(), 0))
    RunFiles(directory.path).write_config(BalanceConfig().to_json())
    try:
        yield directory.path
    finally:
        directory.leave()
