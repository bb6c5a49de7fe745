"""Hostile traffic that costs whoever sends it as little as possible, until ``stop``."""

import os
import selectors
import socket
from contextlib import suppress
from typing import Any

from tests.support.namespaces import enter_network

__all__ = ["ask", "flood"]

CLIENTS, DATAGRAM_BYTES = 8, 32
PATHS = (  # each asks for something that nobody has asked for
    "/v1/balance?since_ns={}",
    "/v1/balance/heatmap?since_ns={}",
    "/v1/balance/policies?since_ns={}",
    "/v1/balance/batches?limit=1000&before={}",
)


def ask(address: tuple[str, int], stop: Any, count: Any) -> None:
    """``CLIENTS`` connections, each asking again as soon as it has an answer, or is refused."""
    waiting = selectors.DefaultSelector()
    number = 0

    def request(client: socket.socket) -> None:
        nonlocal number
        number += 1
        path = PATHS[number % len(PATHS)].format(number)
        client.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

    def connect() -> None:
        client = socket.create_connection(address)
        waiting.register(client, selectors.EVENT_READ, bytearray())
        request(client)

    for _ in range(CLIENTS):
        connect()
    while not stop.is_set():
        for key, _ in waiting.select(0.1):
            client, answer = key.fileobj, key.data
            assert isinstance(client, socket.socket)
            try:
                piece = client.recv(1 << 20)
            except OSError:
                piece = b""
            answer += piece
            if not piece:
                waiting.unregister(client)
                client.close()
                connect()
            elif _is_whole(answer):
                count.value += 1
                answer.clear()
                request(client)


def _is_whole(answer: bytearray) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    return bool(found) and len(body) >= int(length or 0)


def flood(network: str, address: tuple[str, int], stop: Any, count: Any) -> None:
    """Datagrams of no group, as fast as a core can send them."""
    enter_network(network)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        datagram = os.urandom(DATAGRAM_BYTES)
        while not stop.is_set():
            for _ in range(200):
                with suppress(OSError):
                    link.sendto(datagram, address)
            count.value += 200
