"""DeviceFabric's memory and tables, without a GPU; what runs on them is in tests/device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ultraep_kernels.device.stream import Programs

from tests.support.host_driver import HostDriver
from ultraep_serve.balance.cuda.backend import StopNotice
from ultraep_serve.balance.memory import HandleKind
from ultraep_serve.balance.rendezvous import GatherRendezvous
from ultraep_serve.balance.slots import SlotPool
from ultraep_serve.errors import DeviceError, PeerTimeoutError
from ultraep_serve.system.topology import Location

pytest.importorskip("triton", reason="the fabric launches kernels written in Triton")

from ultraep_kernels.device.exchange import inbox_bytes
from ultraep_kernels.device.status import DeviceStatus

from tests.support.mirror import Mirror
from ultraep_serve.balance.cuda.fabric import DeviceFabric, Limits

MASTERS, SLOTS, CHUNK, WIDTH = 3, 2, 4096, 9
LIMITS = Limits(row_width=WIDTH, max_chunks=65, patience_ns=100_000, programs=Programs(2, 2))


@contextmanager
def pool_on(driver: HostDriver) -> Iterator[tuple[SlotPool, list[Any]]]:
    """A pool with two layers of two tensors, one mapped behind the masters, one packed."""
    pool = SlotPool(driver, SLOTS, CHUNK)
    shapes = ((MASTERS, 65536), (MASTERS, 11, 3))
    layers = [pool.adopt([torch.full(shape, float(i)) for shape in shapes]) for i in range(2)]
    try:
        yield pool, layers
    finally:
        pool.close()
        driver.require_clean()


@pytest.fixture
def fabric() -> Iterator[DeviceFabric]:
    """Of one rank alone."""
    with pool_on(HostDriver()) as (pool, _):
        made = DeviceFabric(pool, Mirror(0, 1), Location.on_one_host(0, 1), LIMITS)
        yield made
        made.close()


def test_tables_lead_to_everybodys_memory() -> None:
    driver = HostDriver()
    with pool_on(driver) as (pool, layers):
        fabric = DeviceFabric(pool, Mirror(1, 3), Location.on_one_host(1, 3), LIMITS)
        pools, flag_addresses = fabric.reach.pools.tolist(), fabric.reach.flags.tolist()
        assert len(set(pools)) == 3  # mapped by each rank's own handle
        for index, layer in enumerate(layers):
            count, *words = fabric.chunks(layer).tolist()
            assert (count, words) == (len(layer.chunks), layer.chunks.reshape(-1).tolist())
            for master, region, stride, size in layer.chunks.tolist():
                for rank in range(3):
                    driver.tensor(pools[rank] + region + stride, size).fill_(rank + 1)
                    seen = driver.tensor(master + (MASTERS + 1) * stride, size)
                    assert (seen == rank + 1).all()
            assert (layer.tensors[1][:MASTERS] == index).all()
        assert all(flag % 8 == 0 for flag in flag_addresses)
        inboxes = fabric.inboxes.addresses.tolist()
        apart = [flag - inbox for flag, inbox in zip(flag_addresses, inboxes, strict=True)]
        assert apart == [inbox_bytes(3, WIDTH)] * 3
        signals = inbox_bytes(3, WIDTH) + SLOTS * LIMITS.max_chunks * 8
        assert not driver.tensor(inboxes[2], signals).any()
        fabric.close()


@pytest.mark.parametrize("kind", list(HandleKind))
def test_whatever_fails_leaves_nothing_behind(kind: HandleKind) -> None:
    """Three ranks, every single driver call failing once."""
    before = len(os.listdir("/proc/self/fd"))

    def build(fail_at: int) -> int:
        driver = HostDriver(kind, error="CUDA_ERROR_INVALID_VALUE")
        rendezvous = (
            Mirror(0, 3)
            if kind is HandleKind.FILE_DESCRIPTOR
            else GatherRendezvous(0, range(3), lambda data: [data] * 3)
        )
        with pool_on(driver) as (pool, _):
            done = len(driver.calls)
            driver.fail_at = done + fail_at if fail_at else 0
            DeviceFabric(pool, rendezvous, Location.on_one_host(0, 3), LIMITS).close()
            return len(driver.calls) - done

    calls = build(fail_at=0)
    assert calls > 20
    for fail_at in range(1, calls + 1):
        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
            build(fail_at)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_wait_given_up_is_an_error_of_a_peer(fabric: DeviceFabric) -> None:
    fabric.require_peers()
    fabric.status.fill_(int(DeviceStatus.SHARE_TOO_SMALL))
    fabric.require_peers()
    fabric.status.fill_(int(DeviceStatus.SLOT_TIMEOUT | DeviceStatus.EXCHANGE_TIMEOUT))
    with pytest.raises(PeerTimeoutError, match="the load exchange and replicated experts"):
        fabric.require_peers()
    with pytest.raises(ValueError, match="int32"):
        fabric.exchange(torch.zeros(WIDTH + 1, dtype=torch.int32))


def test_an_error_of_a_stopped_device_has_its_reason(
    fabric: DeviceFabric, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks the device gets the reason in place of CUDA's error; the log has it too, once."""
    recorder: Any = SimpleNamespace(fail=(reasons := list[str]()).append)
    notice = StopNotice(fabric, recorder)
    notice()
    with pytest.raises(RuntimeError, match="launch failure"), fabric.naming_lost_peers():
        raise RuntimeError("unspecified launch failure")
    fabric.reported.fill_(int(DeviceStatus.SLOT_TIMEOUT))
    with pytest.raises(PeerTimeoutError, match="replicated"), fabric.naming_lost_peers():
        raise RuntimeError("unspecified launch failure")
    notice()
    notice()
    assert reasons == [fabric.lost_peers]
    assert [fabric.lost_peers in text for text in caplog.messages] == [True]
