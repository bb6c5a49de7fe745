"""The control page, for one change at a time."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from ultraep_serve.errors import ControlError
from ultraep_serve.sidecar.store import RunStore
from ultraep_serve.telemetry.control import ControlPage

__all__ = ["Control"]


class Control:
    """The control page in ``run_dir``, for one change at a time."""

    def __init__(self, store: RunStore, run_dir: Path) -> None:
        self._store, self._run_dir = store, run_dir
        self._one_writer = threading.Lock()

    @contextlib.contextmanager
    def page(self) -> Iterator[ControlPage]:
        """The page. Raises ControlError where there is none, or ranks read another host's."""
        with self._one_writer:
            location = self._store.poll().location  # counts records from before the change, too
            if location is not None and location.host.start > 0:
                raise ControlError(
                    f"the policy of all {location.num_ranks} ranks is set on the first host, "
                    f"{location.first_host or 'which holds rank 0'}: ask the sidecar there"
                )
            try:
                page = ControlPage.open(self._run_dir)
            except ControlError as error:
                raise ControlError(
                    f"{error}; the engine is still loading, was started with --policy off, or "
                    "somebody has deleted its files"
                ) from error
            with page:
                yield page
