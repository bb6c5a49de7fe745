"""The sidecar's endpoints for recording routing, seen from a client."""

import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx

from ultraep_serve.bench.errors import BenchError
from ultraep_serve.bench.sidecar import Sidecar

__all__ = ["RecordProgress", "RecordingSidecar"]

SETTLE_SECONDS = 60.0  # for the batch that runs when a recording ends
POLL_SECONDS = 0.1
SLACK_BYTES = 1 << 20  # beyond what a spool was allowed, for its header


@dataclass(frozen=True)
class RecordProgress:
    """How far the ranks have come."""

    ranks: tuple[int, ...]  # that have a spool
    batches: int  # complete ones with tokens, of the rank that has most
    lost_batches: int  # that did not fit, of the rank that lost most
    is_open: bool  # a rank is in the middle of a batch


class RecordingSidecar(Sidecar):
    """Starts and ends a recording and fetches it. Every method raises BenchError when refused."""

    def start(self, level: str, max_bytes: int) -> int:
        """Record at ``level``, ``max_bytes`` over all ranks; returns the recording's number."""
        about = self._object("GET", "/v1/balance")
        ranks, mode = about.get("num_ranks"), about.get("mode")
        if not isinstance(ranks, int) or ranks < 1:
            raise BenchError(f"{self.url}/v1/balance names no ranks; is that the sidecar?")
        share = max_bytes // ranks if mode == "data" else max_bytes
        self._max_bytes = max(share, 1 << 20)
        number = self._set(level, self._max_bytes).get("number")
        if not isinstance(number, int):
            raise BenchError(f"{self.url} does not know recordings; update the server")
        return number

    def stop(self) -> None:
        """End whatever recording runs; ranks finish the batch they are in."""
        self._set("off")

    def progress(self, number: int) -> RecordProgress:
        """How far recording ``number`` has come; also BenchError when another has replaced it."""
        body = self._object("GET", "/v1/record", headers=self._headers)
        try:
            spools = [spool for spool in body["spools"] if spool["number"] >= number]
            if any(spool["number"] > number for spool in spools):
                raise BenchError("another recording was started meanwhile; record again")
            return RecordProgress(
                ranks=tuple(int(spool["rank"]) for spool in spools),
                batches=max((int(spool["batches"]) for spool in spools), default=0),
                lost_batches=max((int(spool["lost_batches"]) for spool in spools), default=0),
                is_open=any(spool["is_open"] for spool in spools),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(f"{self.url}/v1/record answers with something else") from error

    def spools(self, number: int) -> list[bytes]:
        """The spools of all ranks of recording ``number``, which was stopped."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (progress := self.progress(number)).is_open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return [self._spool(rank) for rank in progress.ranks]

    def forget(self) -> None:
        """Give the server its shared memory back."""
        self._checked(self.call("DELETE", "/v1/record", headers=self._headers))

    def _set(self, level: str, max_bytes: int | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {"level": level}
        if max_bytes is not None:
            body["max_bytes"] = max_bytes
        return self._object("POST", "/v1/control/record", json=body, headers=self._headers)

    def _spool(self, rank: int) -> bytes:
        request = self.build("GET", f"/v1/record/spool/{rank}", headers=self._headers)
        with closing(self.send(request, stream=True)) as response:
            if not response.is_success:
                response.read()
            self._checked(response)
            content = bytearray()
            try:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > self._max_bytes + SLACK_BYTES:
                        raise BenchError(f"rank {rank} sends more than it was allowed to record")
            except httpx.TransportError as error:
                raise self.unreachable(error) from error
        return bytes(content)
