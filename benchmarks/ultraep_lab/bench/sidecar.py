"""The sidecar's endpoints, seen from a client: balance and control."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from ultraep_lab.bench.endpoint import Endpoint, json_object, understood
from ultraep_lab.errors import BenchError
from ultraep_serve.types import Policy

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CATCH_UP_SECONDS = 2.5  # the oldest that its answers can be

REMEDIES = {
    401: "give the control token with --token-file or ULTRAEP_CONTROL_TOKEN",
    403: "start the server with a control token (ULTRAEP_CONTROL_TOKEN) and give the same here",
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
        self._token = token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._ours: set[Policy] = set()  # in ``policy_restored``: what may be in force by us

    def policy(self) -> Policy:
        """The policy in force.

        Raises BenchError when the sidecar does not say, and where balancing has switched itself
        off, which setting a policy would hide.
        """
        answer = self.call("GET", "/v1/balance")
        balance = json_object(answer if answer.status_code == 503 else self._checked(answer))
        if balance.get("status") == "unbalanced":
            raise BenchError(f"{self.url}/v1/balance: {balance['reasons'].get('run')}")
        name = balance.get("policy")
        if not isinstance(name, str):
            raise BenchError(
                f"{self.url}/v1/balance names no policy in force: the engine is still loading or "
                "was started with --policy off; wait, or start it with balancing on"
            )
        with understood(self.url):
            return Policy(name)

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on.

        Raises BenchError when refused, or in ``policy_restored`` where somebody else has set one.
        """
        self._require_ours()
        if self._ours:
            self._ours.add(policy)  # from here on, also where no answer comes
        body, headers = {"policy": policy.value}, self._headers
        response = self.call("POST", "/v1/control/policy", json=body, headers=headers)
        if response.status_code == 409 and policy is Policy.IDEAL:
            raise self.refused(response, IDEAL_REFUSED)
        self._checked(response)
        if self._ours:
            self._ours = {policy}

    def balance(self, since_ns: int, policy: Policy, batches: int = 0) -> dict[str, Any]:
        """Statistics of the batches since ``since_ns`` (wall clock, ns) under ``policy``.

        The sidecar reads records with some delay, and keeps the last ones only: this repeats until
        its answer has ``batches``, for at most 2.5 seconds.
        """
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        params = {"since_ns": since_ns, "policy": policy.value}
        while True:
            balance = self._object("GET", "/v1/balance", params=params)
            with understood(self.url):
                known = min((int(layer["records"]) for layer in balance["layers"]), default=0)
            if known >= batches or time.monotonic() > deadline:
                return balance
            time.sleep(_CATCH_UP_SECONDS / 10)

    @contextmanager
    def policy_restored(self) -> Iterator[None]:
        """Put the policy of this moment back at the end, after an error, Ctrl-C or SIGTERM too.

        The first signal that would end the program is Ctrl-C, and later ones change nothing. Raises
        BenchError when refused; after an error that one is raised.
        """
        before = self.policy()
        self._ours = {before}
        with _one_signal() as taken:
            try:
                yield
            except BaseException:
                taken.append(0)
                with suppress(BenchError):
                    self.set_policy(before)
                raise
            else:
                taken.append(0)
                self.set_policy(before)
            finally:
                self._ours = set()

    def _require_ours(self) -> None:
        if self._ours and (found := self.policy()) not in self._ours:
            ours = " or ".join(sorted(policy.value for policy in self._ours))
            raise BenchError(
                f"policy {found.value} is in force at {self.url}, not {ours} as set here: somebody "
                "has set it; measure again"
            )

    def _object(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        return json_object(self._checked(self.call(method, path, **content)))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            raise self.refused(response, REMEDIES.get(response.status_code, "read its log"))
        return response


@contextmanager
def _one_signal() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for one that ends a program, unless the list has one already."""
    taken: list[int] = []

    def take(number: int, _frame: Any) -> None:
        if not taken:
            taken.append(number)
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = {number: signal.getsignal(number) for number in _SIGNALS if is_main}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, take)
        yield taken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
