"""Datagrams between hosts: strangers, floods, and who hears whom."""

import json
import socket
import threading
import time

import numpy as np
import pytest

from tests.support.watching import halve_times, pair
from ultraep_serve.balance.host_link import HostLink, Message, join_hosts
from ultraep_serve.balance.topology import Location


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_times(monkeypatch)


def test_datagrams_of_strangers_are_ignored() -> None:
    first, second = pair()
    good = {"host": 1, "unheard": [], "quiet": [], "lost": "", "leaves": False}
    bad: list[object] = [[], 7, None, {}, good | {"host": 9}, good | {"host": 0}]
    bad += [good | {"unheard": 3}, good | {"quiet": ["x"]}, good | {"host": 1e400}]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        target = second.addresses[0]
        stranger.sendto(b"", target)
        stranger.sendto(b"\0" * 16 + json.dumps(good | {"lost": "forged"}).encode(), target)
        stranger.sendto(first.token, target)
        stranger.sendto(first.token + b"[" * 60000, target)
        for content in bad:
            stranger.sendto(first.token + json.dumps(content).encode(), target)
        stranger.sendto(first.token + json.dumps(good | {"lost": "a\x1b\nb"}).encode(), target)
        time.sleep(0.2)
        assert [message.lost for message in first.receive()] == ["ab"]
    for link in (first, second):
        link.close()


def test_a_flood_of_strangers_takes_no_room_from_hosts() -> None:
    first, second = pair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(20_000):  # many times what the buffer holds
            stranger.sendto(b"x" * 32, second.addresses[0])
    second.send(Message(1, [], [], "", False))
    assert [message.host for message in first.receive()] == [1]
    for link in (first, second):
        link.close()


def test_strangers_are_dropped_where_the_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultraep_serve.balance.host_link._drop_strangers", lambda *_: None)
    first, second = pair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(100):
            stranger.sendto(b"x" * 32, second.addresses[0])
    second.send(Message(1, [], [], "", False))
    assert [message.host for message in first.receive()] == [1]
    for link in (first, second):
        link.close()


def test_hosts_hear_each_other_or_do_without(caplog: pytest.LogCaptureFixture) -> None:
    first, second = pair()
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(second.hears_all()))
    thread.start()
    assert first.hears_all()
    thread.join()
    assert heard == [True]
    second.close()
    list(first.receive())  # what was on its way
    assert not first.hears_all()
    first.close()

    def gather(row: np.ndarray) -> np.ndarray:
        return np.stack([row, row])  # the other host's datagrams go nowhere

    assert join_hosts(Location(0, 2, 1, 1), "no.such.host.invalid", gather) is None
    assert "UDP does not pass" in caplog.text


def test_heartbeats_of_512_hosts_wait_for_a_look() -> None:
    """With what Linux sets aside for anybody."""
    link = HostLink("127.0.0.1", 0, 512)
    link.know(np.stack([link.card] * 512))
    target = "127.0.0.1", int(link.card[-1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as others:
        for host in range(1, 512):
            message = Message(host, [], [], "", False)
            others.sendto(link.token + json.dumps(message._asdict()).encode(), target)
    assert {message.host for message in link.receive()} == set(range(1, 512))
    link.close()
