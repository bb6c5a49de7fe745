"""The sidecar's endpoints, seen from a client: balance, control, and recording of routing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from ultraep_lab.endings import undone
from ultraep_serve.config import parse_policy
from ultraep_serve.errors import BenchError, understood
from ultraep_serve.system.http import Endpoint, json_object
from ultraep_serve.types import Policy

__all__ = ["CaptureProgress", "CaptureSidecar", "Sidecar"]

_CATCH_UP_SECONDS = 2.5  # the oldest that its answers can be

REMEDIES = {
    401: "give the control token with --token, --token-file or ULTRAEP_CONTROL_TOKEN",
    403: "start the server with a control token (ULTRAEP_CONTROL_TOKEN) and give the same here",
    404: "give the sidecar's address with --sidecar (the engine's goes to --url)",
    409: "wait until its /readyz answers, and start the server without --policy off",
    507: "choose a smaller --max-mib, or free shared memory",
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
        self._kept: Policy | None = None  # in ``policy_restored``: what was set last

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a GET. Raises BenchError when refused."""
        return self._object("GET", path)

    def policy(self) -> Policy:
        """The policy in force. Raises BenchError when the sidecar does not say."""
        name = self._object("GET", "/v1/config").get("policy")
        if not isinstance(name, str):
            raise BenchError(
                f"{self.url}/v1/config names no policy in force: the engine is still loading or "
                "was started with --policy off; wait, or start it with balancing on"
            )
        return parse_policy(name)

    def set_policy(self, policy: Policy) -> None:
        """Put ``policy`` in force from the next batch on.

        Raises BenchError when refused, or in ``policy_restored`` where somebody else has set one.
        """
        self._require_kept()
        body, headers = {"policy": policy.value}, self._headers
        response = self.call("POST", "/v1/control/policy", json=body, headers=headers)
        if response.status_code == 403 and policy is Policy.IDEAL:
            raise self.refused(response, IDEAL_REFUSED)
        self._checked(response)
        if self._kept is not None:
            self._kept = policy

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

        Raises BenchError when refused.
        """
        self._kept = before = self.policy()
        try:
            with undone(lambda: self.set_policy(before), f"policy {before.value}"):
                yield
        finally:
            self._kept = None

    def _require_kept(self) -> None:
        if self._kept is not None and (found := self.policy()) is not self._kept:
            raise BenchError(
                f"policy {found.value} is in force at {self.url}, not {self._kept.value} as set "
                "here: somebody has set it, or balancing has switched itself off (see /readyz); "
                "measure again"
            )

    def _object(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        return json_object(self._checked(self.call(method, path, **content)))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if not response.is_success:
            raise self.refused(response, REMEDIES.get(response.status_code, "read its log"))
        return response


SETTLE_SECONDS = 60.0  # for the batch that runs when a recording ends
SPOOL_SECONDS = 600.0  # to fetch one
POLL_SECONDS = 0.1
SLACK_BYTES = 1 << 20  # beyond what a spool was allowed, for its header


@dataclass(frozen=True)
class CaptureProgress:
    """How far the ranks have come."""

    ranks: tuple[int, ...]  # that have a spool
    batches: int  # complete ones with tokens, of the rank that has most
    lost_batches: int  # that did not fit, of the rank that lost most
    is_open: bool  # a rank is in the middle of a batch


class CaptureSidecar(Sidecar):
    """Starts and ends a recording and fetches it. Every method raises BenchError when refused."""

    _max_bytes = 0  # of one spool
    _may_run = False  # whether the server may be recording for this client

    def start(self, level: str, max_bytes: int) -> int:
        """Record at ``level``, ``max_bytes`` over all ranks; returns the recording's number."""
        about = self._object("GET", "/v1/balance")
        ranks, mode = about.get("num_ranks"), about.get("mode")
        if not isinstance(ranks, int) or ranks < 1:
            raise BenchError(f"{self.url}/v1/balance names no ranks; is it the sidecar's address?")
        share = max_bytes // ranks if mode == "data" else max_bytes
        self._max_bytes = max(share, 1 << 20)
        self._may_run = True
        answer = self._set(level, max_bytes=self._max_bytes)
        self._may_run = answer.is_success
        number = json_object(self._checked(answer)).get("number")
        if not isinstance(number, int):
            raise BenchError(f"{self.url} cannot record; update the server")
        return number

    def stop(self) -> None:
        """End the recording that was started, if it was; ranks finish the batch they are in."""
        if self._may_run:
            self._checked(self._set("off"))

    def progress(self, number: int) -> CaptureProgress:
        """How far recording ``number`` has come; also BenchError when another has replaced it."""
        body = self._object("GET", "/v1/record", headers=self._headers)
        with understood(f"{self.url}/v1/record"):
            spools = [spool for spool in body["spools"] if spool["number"] >= number]
            if any(spool["number"] > number for spool in spools):
                raise BenchError("another recording was started meanwhile; record again")
            return CaptureProgress(
                ranks=tuple(int(spool["rank"]) for spool in spools),
                batches=max((int(spool["batches"]) for spool in spools), default=0),
                lost_batches=max((int(spool["lost_batches"]) for spool in spools), default=0),
                is_open=any(spool["is_open"] for spool in spools),
            )

    def spools(self, number: int) -> list[bytes]:
        """The spools of all ranks of recording ``number``, which was stopped."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (progress := self.progress(number)).is_open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return [self._spool(rank) for rank in progress.ranks]

    def forget(self) -> None:
        """Free the server's shared memory."""
        self._checked(self.call("DELETE", "/v1/record", headers=self._headers))

    def _set(self, level: str, **limits: int) -> httpx.Response:
        body = {"level": level, **limits}
        return self.call("POST", "/v1/control/record", json=body, headers=self._headers)

    def _spool(self, rank: int) -> bytes:
        request = self.build("GET", f"/v1/record/spool/{rank}", headers=self._headers)
        with self.in_time(SPOOL_SECONDS):
            response = self.send(request)
            if not response.is_success:
                self._checked(self.whole(response))
            return b"".join(self.pieces(response, self._max_bytes + SLACK_BYTES))
