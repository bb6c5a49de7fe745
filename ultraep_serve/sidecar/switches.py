"""What can be changed while serving: policy, pause, threshold, recording.

While paused the policy is off, and the one to resume is stored beside the control page.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from ultraep_serve.errors import ControlError, OutputError
from ultraep_serve.ring.control import ControlPage, Recording, RecordLevel
from ultraep_serve.sidecar.store import RunStore, forget_pause, paused_policy, remember_pause
from ultraep_serve.types import Policy

__all__ = [
    "NotAllowedError",
    "Switches",
]

_NO_PAGE = "the engine is still loading, or was started with --policy off"


class NotAllowedError(Exception):
    """The operator did not permit this when the sidecar was started."""


class Switches:
    """Writes to the control page in ``run_dir``, one change at a time.

    Every method raises ControlError where there is no page, or nothing to do.
    """

    def __init__(self, store: RunStore, run_dir: Path, allow_ideal: bool) -> None:
        self._store = store
        self._run_dir = run_dir
        self._allow_ideal = allow_ideal
        self._one_writer = threading.Lock()

    def set_policy(self, policy: Policy) -> int:
        """Put ``policy`` in force; returns how many times one was set.

        Raises NotAllowedError for the policy that gives wrong answers.
        """
        if policy is Policy.IDEAL and not self._allow_ideal:
            raise NotAllowedError(
                "policy 'ideal' routes tokens to the wrong experts and is for measuring only; "
                "start with --allow-ideal if that is what you want"
            )
        with self._one_writer, self._counting_page() as page:
            forget_pause(self._run_dir)
            return page.set_policy(policy)

    def pause(self) -> int:
        """Policy off, and remember the one in force."""
        with self._one_writer, self._counting_page() as page:
            if page.policy is not Policy.OFF:
                self._remember(page.policy)
            return page.set_policy(Policy.OFF)

    def resume(self) -> tuple[Policy, int]:
        """Put the policy in force again that was paused; returns it, too."""
        with self._counting_page():
            paused = paused_policy(self._run_dir)
        if paused is None:
            raise ControlError("nothing is paused; set a policy instead")
        return paused, self.set_policy(paused)

    def set_max_imbalance(self, max_imbalance: float | None) -> None:
        """Leave layers alone at or below ``max_imbalance``; None: as at start."""
        with self._one_writer, self._counting_page() as page:
            page.set_max_imbalance(max_imbalance)

    def record(self, level: RecordLevel, max_bytes: int) -> Recording:
        """Start another recording, or end the one that runs."""
        with self._one_writer, self._page() as page:
            return page.record(level, max_bytes)

    @contextlib.contextmanager
    def _page(self) -> Iterator[ControlPage]:
        self._store.poll()  # what came before is counted before the switch
        try:
            page = ControlPage.open(self._run_dir)
        except ControlError as error:
            raise ControlError(f"{error}; {_NO_PAGE}") from error
        with page:
            yield page
        self._store.outdate()

    @contextlib.contextmanager
    def _counting_page(self) -> Iterator[ControlPage]:
        """The page, where its policy and threshold count: only those of the host with rank 0 do."""
        with self._page() as page:
            location = self._store.location()
            if location is not None and location.host.start > 0:
                raise ControlError(
                    f"policy and threshold of all {location.num_ranks} ranks are set on the first "
                    f"host, {location.first_host or 'which holds rank 0'}: ask the sidecar there"
                )
            yield page

    def _remember(self, policy: Policy) -> None:
        try:
            remember_pause(self._run_dir, policy)
        except OutputError as error:
            raise ControlError(f"cannot pause, set policy off instead: {error}") from error
