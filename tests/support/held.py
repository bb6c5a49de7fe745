"""Copies that come late, so that a kernel which does not wait for them computes without."""

import time
from pathlib import Path
from typing import Any

import pytest

from ultraep_serve.balance.host.fabric import HostFabric

__all__ = ["Held"]


class Held:
    """Holds back what rank 0 sends, until the others wait for it or have launched the kernel.

    So what arrives comes behind a launch that has not waited. For layers in turn.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._is_on = False
        self._sent = self._come = 0

    def come(self) -> None:
        """Say that this rank waits, or launches; once for a layer that has copies."""
        if self._is_on and self._come < self._sent:
            self._come += 1
            (self._folder / f"come-{self._rank}-{self._come}").touch()

    def hold(self, patch: pytest.MonkeyPatch) -> None:
        stream, wait, self._is_on = HostFabric.stream, HostFabric.wait_slots, True

        def sent(*of: Any) -> None:
            self._sent += 1
            if self._rank == 0:
                self._wait_for_others()
            stream(*of)

        def awaited(*of: Any) -> None:
            self.come()
            wait(*of)

        patch.setattr(HostFabric, "stream", sent)
        patch.setattr(HostFabric, "wait_slots", awaited)

    def _wait_for_others(self) -> None:
        for rank in range(1, self._num_ranks):
            while not (self._folder / f"come-{rank}-{self._sent}").exists():
                time.sleep(0.001)
