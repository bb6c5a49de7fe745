"""Bytes of a connection to the sidecar, without a socket."""

import asyncio
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from tests.support.rings import planned_run
from ultraep_serve.sidecar.access import server_settings
from ultraep_serve.sidecar.app import create_app

__all__ = ["http_target"]

_ANSWER_SECONDS = 5.0


class _Transport(asyncio.Transport):
    """A connection whose other end keeps all that is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def http_target(folder: Path) -> Callable[[bytes], None]:
    """The sidecar over a made-up run; an answer is no error of its own, and comes in time."""
    run = planned_run(folder)
    run.batch()
    run.close()
    app = create_app(folder, "open-sesame")
    config = uvicorn.Config(**server_settings(app), log_level="critical", lifespan="off")
    config.load()
    loop = asyncio.new_event_loop()

    async def exchange(data: bytes) -> bytes:
        state, transport = ServerState(), _Transport()
        protocol: Any = config.http_protocol_class(
            config=config, server_state=state, app_state={}, _loop=loop
        )
        protocol.connection_made(transport)
        protocol.data_received(data)
        await asyncio.sleep(0)
        # Who waits for more of a body waits for ever.
        is_whole = protocol.conn.their_state is not h11.SEND_BODY
        if state.tasks and is_whole:
            await asyncio.wait(state.tasks, timeout=_ANSWER_SECONDS / 2)
        protocol.connection_lost(None)
        if state.tasks:
            _, late = await asyncio.wait(state.tasks, timeout=_ANSWER_SECONDS)
            assert not late, "an answer does not end"
        return bytes(transport.written)

    def read(data: bytes) -> None:
        if not data:
            return  # no bytes are the end of a connection
        written = loop.run_until_complete(exchange(data))
        assert not written or written.startswith(b"HTTP/1.1 "), written[:100]
        assert not written.startswith(b"HTTP/1.1 500"), data

    weakref.finalize(read, loop.close)
    return read
