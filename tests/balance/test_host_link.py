"""Datagrams between hosts: strangers, floods, and who hears whom."""

import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.waiting import until
from tests.support.watching import halve_times, pair
from ultraep_serve.balance.host_link import HostLink, Message, StageMeeting, join_hosts
from ultraep_serve.system.topology import Location


@pytest.fixture(autouse=True)
def _half_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_times(monkeypatch)


GOOD = {"host": 1, "unheard": [], "quiet": [], "lost": "", "leaves": False, "sent": 7}


def test_datagrams_of_strangers_are_ignored() -> None:
    first, second = pair()
    other_group = HostLink("127.0.0.1", 1, 2)
    bad: list[object] = [[], 7, None, {}, GOOD | {"host": 9}, GOOD | {"host": 0}]
    bad += [GOOD | {"unheard": 3}, GOOD | {"quiet": ["x"]}, GOOD | {"host": 1e400}]
    bad += [{name: value for name, value in GOOD.items() if name != "sent"}]
    forged = first.sealed(GOOD | {"lost": "forged"})
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for datagram in (
            b"",
            other_group.sealed(GOOD | {"lost": "forged"}),
            forged[:16],  # what everybody on the network sees
            forged[:16] + b"\0" * 32 + forged[48:],
            forged[:-9] + b"X" + forged[-8:],
            forged[:16] + b"[" * 60000,
            *map(first.sealed, bad),
            first.sealed(GOOD | {"lost": "a\x1b\nb"}),
        ):
            stranger.sendto(datagram, second.addresses[0])
        time.sleep(0.2)
        assert [message.lost for message in first.receive()] == ["ab"]
    for link in (first, second, other_group):
        link.close()


def test_what_was_sent_before_counts_no_more_but_last_words() -> None:
    """Whoever kept datagrams cannot make a host that is silent seem to live."""
    first, second = pair()
    alive, again = GOOD | {"quiet": [1]}, GOOD | {"sent": 9}
    lost, leaves = GOOD | {"sent": 3, "lost": "power"}, GOOD | {"sent": 4, "leaves": True}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as network:
        for values in (alive, alive, again, alive, lost, leaves, again):
            network.sendto(first.sealed(values), second.addresses[0])
        time.sleep(0.2)
        told = [(message.quiet, message.lost, message.leaves) for message in first.receive()]
    assert told == [([1], "", False), ([], "", False), ([], "power", False), ([], "", True)]
    for link in (first, second):
        link.close()


def test_the_key_that_is_left_for_the_launcher_is_for_this_user_only(tmp_path: Path) -> None:
    first, second = pair()
    before = os.umask(0)
    try:
        first.save(tmp_path / "link")
    finally:
        os.umask(before)
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o600
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


class StoppedStore:
    """Of a host that stands still until it is ``released``."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        self.released.wait()
        if len(self.values) < len(keys):
            raise RuntimeError("connection reset")  # once more, then
        return True


def test_a_store_that_stands_still_holds_nobody_up() -> None:
    store = StoppedStore()
    meetings = [StageMeeting(store, 0, 2, 7, "127.0.0.1")]
    assert meetings[0].link() is None
    store.released.set()
    assert meetings[0].link() is None
    meetings.append(StageMeeting(store, 1, 2, 8, "127.0.0.1"))
    links: list[HostLink | None] = [None, None]

    def have_met() -> bool:
        for number, meeting in enumerate(meetings):
            links[number] = links[number] or meeting.link()
        return all(links)

    until(have_met, 10.0)
    first, second = links
    assert first is not None
    assert second is not None
    assert (first.host, second.host, first.key) == (0, 1, second.key)
    for link in (first, second):
        link.close()


def test_heartbeats_of_512_hosts_wait_for_a_look() -> None:
    """With what Linux sets aside for anybody."""
    link = HostLink("127.0.0.1", 0, 512)
    link.join(np.stack([link.endpoint] * 512))
    target = "127.0.0.1", int(link.endpoint[-1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as others:
        for host in range(1, 512):
            sent = time.monotonic_ns()
            others.sendto(link.sealed(GOOD | {"host": host, "sent": sent}), target)
    assert {message.host for message in link.receive()} == set(range(1, 512))
    link.close()
