"""The sidecar's control and balance endpoints."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ultraep_serve.bench.errors import BenchError
from ultraep_serve.bench.http import Endpoint, json_object
from ultraep_serve.config import parse_policy
from ultraep_serve.types import Policy

__all__ = ["Sidecar"]

logger = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 2.5  # the oldest its answers can be

REMEDIES = {
    401: "give the control token with --token, --token-file or ULTRAEP_CONTROL_TOKEN",
    403: "start the server with a control token (ULTRAEP_CONTROL_TOKEN) and give the same one here",
    404: "give the sidecar's address with --sidecar (the engine's goes to --url)",
    409: "wait until its /readyz answers, and start the server without --policy off",
    503: "wait until its /readyz answers, then try again",
}
IDEAL_REFUSED = "start the server with --allow-ideal, or leave `ideal` out of --policies"


class Sidecar(Endpoint):
    """Sets the policy of the next batches and reads how balanced past ones were."""

    def __init__(self, url: str, token: str | None, timeout_seconds: float = 30.0) -> None:
        """Raises ConfigError when ``url`` is no address; nothing is sent yet."""
        super().__init__("the sidecar", "--sidecar", url, timeout_seconds)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def policy(self) -> Policy:
        """The policy in force. Raises BenchError when the sidecar does not say."""
        name = self._object("GET", "/v1/config").get("policy")
        if not isinstance(name, str):
            raise BenchError(
                f"{self.url}/v1/config names no policy in force: the engine is still loading, or "
                "was started with --policy off; wait, or start it with balancing on"
            )
        return parse_policy(name)

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on. Raises BenchError when refused."""
        response = self.call(
            "POST", "/v1/control/policy", json={"policy": policy.value}, headers=self._headers
        )
        if response.status_code == 403 and policy is Policy.IDEAL:
            raise self.refused(response, IDEAL_REFUSED)
        self._checked(response)

    def balance(self, since_ns: int, policy: Policy, batches: int = 0) -> dict[str, Any]:
        """Statistics of the batches since ``since_ns`` (wall clock, ns) under ``policy``.

        Its answers are a little old, so it is asked until it knows of as many ``batches``, within
        reason: it keeps no more than the last ones.
        """
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        params = {"since_ns": since_ns, "policy": policy.value}
        while True:
            balance = self._object("GET", "/v1/balance", params=params)
            known = min((layer["records"] for layer in balance["layers"]), default=0)
            if known >= batches or time.monotonic() > deadline:
                return balance
            time.sleep(_CATCH_UP_SECONDS / 10)

    @contextmanager
    def policy_restored(self) -> Iterator[None]:
        """Whatever happens inside, Ctrl-C too: afterwards the policy is what it was before."""
        before = self.policy()
        try:
            yield
        except BaseException:
            try:
                self.set_policy(before)
            except BenchError as error:  # the first error is the one to report
                logger.warning("the policy could not be set back to %s: %s", before.value, error)
            raise
        self.set_policy(before)

    def _object(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        return json_object(self._checked(self.call(method, path, **content)))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            raise self.refused(response, REMEDIES.get(response.status_code, "look at its log"))
        return response
