"""A lease of a server's policy, renewed by a thread while its holder works.

The server ends it by itself, so that a client that is killed or stopped changes no policy for good.
"""

import contextlib
import os
import platform
import threading
from collections.abc import Callable

from ultraep_serve.errors import BenchError
from ultraep_serve.types import Policy

__all__ = ["LEASE_SECONDS", "PolicyLease"]

LEASE_SECONDS = 30.0
_RENEWALS = 4  # in that time


class PolicyLease:
    """One lease. Methods raise BenchError where it was refused, or lost meanwhile."""

    def __init__(
        self,
        ask: Callable[[Policy, dict[str, object]], str],
        end: Callable[[str], None],
        policy: Policy,
    ) -> None:
        """Take the lease, with ``policy`` in force.

        ``ask`` takes or renews a lease and returns its name, by which ``end`` ends it. Both are
        also called from a thread.
        """
        self._ask, self._end = ask, end
        self._policy, self._name = policy, ""
        self._one_at_a_time, self._ending = threading.Lock(), threading.Event()
        self.set_policy(policy)
        self._renewing = threading.Thread(target=self._renew, name="ultraep-lease", daemon=True)
        self._renewing.start()

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on."""
        with self._one_at_a_time:
            self._policy = policy
            self._renew_once()

    def _renew_once(self) -> None:
        body: dict[str, object] = {"policy": self._policy.value, "seconds": LEASE_SECONDS}
        body |= {"lease": self._name} if self._name else {"holder": _holder()}
        self._name = self._ask(self._policy, body)

    def _renew(self) -> None:
        while not self._ending.wait(LEASE_SECONDS / _RENEWALS):
            # Where it is refused, whoever sets a policy next, or ends the lease, is told so.
            with self._one_at_a_time, contextlib.suppress(BenchError):
                self._renew_once()

    def end(self) -> None:
        """Have the policy from before in force again."""
        self._ending.set()
        self._renewing.join()
        self._end(self._name)


def _holder() -> str:
    return f"process {os.getpid()} on {platform.node()}"[:100]
