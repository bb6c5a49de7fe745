"""The control page, for one change at a time."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fastapi import HTTPException

from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import ControlPage
from ultraep_serve.telemetry.run_files import RunFiles
from ultraep_serve.types import TokenView

__all__ = ["Control"]

_MIB = 1 << 20
_PUT_BACK_SECONDS = 3.0  # for a rank to put a deleted control page back


class Control:
    """The control page in ``run_dir``, for one change at a time."""

    def __init__(self, store: RunStore, run_dir: Path) -> None:
        self.store, self.files = store, RunFiles(run_dir)
        self._one_writer = threading.Lock()

    @contextlib.contextmanager
    def page(self) -> Iterator[ControlPage]:
        """The page. Raises ControlError where there is none."""
        with self._one_writer:
            self.store.poll()  # records from before the change are counted before it
            deadline = time.monotonic() + _PUT_BACK_SECONDS
            while self.store.awaits_control() and time.monotonic() < deadline:
                time.sleep(0.05)
            try:
                page = ControlPage.open(self.files.path)
            except ControlError as error:
                raise ControlError(
                    f"{error}; the engine is still loading, or was started with --policy off"
                ) from error
            with page:
                yield page

    @contextlib.contextmanager
    def first_hosts_page(self) -> Iterator[ControlPage]:
        """The page for all but captures, which ranks read on the host of rank 0 only.

        Raises ControlError also on the other hosts.
        """
        with self.page() as page:
            location = self.store.run.location
            if location is not None and location.host.start > 0:
                raise ControlError(
                    f"policy, threshold and speeds of all {location.num_ranks} ranks are set on "
                    f"the first host, {location.first_host or 'which holds rank 0'}: ask the "
                    "sidecar there"
                )
            yield page

    def require_room(self, max_bytes: int) -> None:
        """For a capture, in shared memory, which holds more. Raises HTTPException."""
        header = self.store.run.header  # without one there is nothing to capture yet
        ranks = 1
        if header is not None and header.mode == TokenView.OWN.value:
            ranks = header.location.host_size
        free = shutil.disk_usage(self.files.path).free
        if ranks * max_bytes > free:
            raise HTTPException(
                507,
                f"shared memory has {free // _MIB} MiB free, the capture may take "
                f"{ranks * max_bytes // _MIB}",
            )
