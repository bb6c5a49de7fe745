"""MappedMemory and CudaDriver's errors, without a GPU: host memory stands in for the device's."""

from contextlib import ExitStack
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.host_driver import HostDriver
from ultraep_serve.balance.cuda.driver import CudaDriver, device_error, open_driver
from ultraep_serve.balance.memory import HandleKind, MappedMemory, create
from ultraep_serve.errors import ConfigError, DeviceError, UnsupportedError


def test_one_allocation_is_seen_wherever_it_is_mapped() -> None:
    driver = HostDriver()
    with ExitStack() as undo:
        shared = create(driver, 5, undo)
        first, second = create(driver, 1, undo), create(driver, driver.granularity + 1, undo)
        assert (shared.size, second.size) == (driver.granularity, 2 * driver.granularity)
        views = []
        for front in (first, second):
            mapped = MappedMemory(driver, [front, shared])
            undo.callback(mapped.close)
            assert mapped.address % driver.granularity == 0
            views.append(driver.tensor(mapped.address + front.size, shared.size))
        views[0].fill_(7)
        assert (views[1] == 7).all()
        views[1][-1] = 9
        assert views[0][-1] == 9
        del views
    driver.require_clean()


def test_nothing_needs_no_range() -> None:
    driver = HostDriver()
    mapped = MappedMemory(driver, [])
    assert (mapped.address, mapped.size) == (0, 0)
    mapped.close()
    assert driver.calls == []


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_whatever_fails_leaves_nothing_behind(fail_at: int) -> None:
    driver = HostDriver(fail_at=fail_at)

    def build() -> None:
        with ExitStack() as undo:
            allocations = [create(driver, 1, undo) for _ in range(3)]
            undo.callback(MappedMemory(driver, allocations).close)

    with pytest.raises(ConfigError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        build()
    assert len(driver.calls) == fail_at
    driver.require_clean()


def test_the_stand_in_refuses_what_cuda_refuses() -> None:
    driver = HostDriver()
    unit = driver.granularity
    with pytest.raises(AssertionError, match="bytes"):
        driver.create(unit - 1)
    address, handle = driver.reserve(2 * unit), driver.create(unit)
    driver.map(address, unit, handle)
    with pytest.raises(AssertionError, match="twice"):
        driver.map(address, unit, handle)
    with pytest.raises(AssertionError, match="not reserved"):
        driver.map(address + 2 * unit, unit, handle)
    with pytest.raises(AssertionError, match="not allowed"):
        driver.tensor(address, 1)
    with pytest.raises(AssertionError, match="not mapped all through"):
        driver.allow(address, 2 * unit)
    with pytest.raises(AssertionError, match="mapped in it"):
        driver.free(address, 2 * unit)
    driver.unmap(address, unit)
    with pytest.raises(AssertionError, match="unmapped twice"):
        driver.unmap(address, unit)
    driver.release(handle)
    with pytest.raises(AssertionError, match="released twice"):
        driver.release(handle)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", ConfigError),
        ("CUDA_ERROR_NOT_PERMITTED", UnsupportedError),
        ("CUDA_ERROR_NOT_SUPPORTED", UnsupportedError),
        ("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", UnsupportedError),
        ("CUDA_ERROR_INVALID_VALUE", DeviceError),
    ],
)
def test_errors_name_the_call_and_what_cuda_said(name: str, error: type[Exception]) -> None:
    made = device_error("cuMemCreate", name)
    assert type(made) is error
    assert f"cuMemCreate: {name}" in str(made)


class _Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class _Names:
    """Any enumerator, by its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class _Bindings:
    """As much of cuda.bindings.driver as ``CudaDriver`` calls, recording it."""

    CUresult = _Result
    CUdevice_attribute = CUmemAllocationHandleType = CUmemAllocationType = _Names()
    CUmemAccess_flags = CUmemLocationType = CUmemAllocationGranularity_flags = _Names()

    def __init__(self, **answers: Any) -> None:
        self.answers = {"cuMemGetAllocationGranularity": 1 << 21, "cuDeviceGetAttribute": 1}
        self.answers.update(answers)
        self.calls: list[tuple[Any, ...]] = []

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            answer = self.answers.get(name, 0)
            return (answer,) if isinstance(answer, _Result) else (_Result.CUDA_SUCCESS, answer)

        return call


def test_memory_is_made_on_the_device_and_shareable() -> None:
    bindings = _Bindings(cuMemCreate=5, cuMemAddressReserve=1 << 30)
    driver = CudaDriver(bindings, 3, HandleKind.FILE_DESCRIPTOR)
    assert driver.granularity == 1 << 21
    handle, address = driver.create(1 << 21), driver.reserve(1 << 21)
    driver.map(address, 1 << 21, handle)
    driver.allow(address, 1 << 21)
    name, size, properties, flags = bindings.calls[-4]
    assert (name, size, flags) == ("cuMemCreate", 1 << 21, 0)
    assert properties.location.id == 3
    assert properties.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
    assert bindings.calls[-3:-1] == [
        ("cuMemAddressReserve", 1 << 21, 1 << 21, 0, 0),
        ("cuMemMap", 1 << 30, 1 << 21, 0, 5, 0),
    ]
    _, _, _, (access,), count = bindings.calls[-1]
    assert (access.location.id, access.flags, count) == (
        3,
        "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
        1,
    )


def test_fabric_handles_travel_as_bytes() -> None:
    exported = SimpleNamespace(data=bytes(64))
    bindings = _Bindings(cuMemExportToShareableHandle=exported, cuMemImportFromShareableHandle=6)
    driver = CudaDriver(bindings, 0, HandleKind.FABRIC)
    assert driver.share(1) == bytes(64)
    assert driver.receive(bytes(64)) == 6
    assert bindings.calls[-1][1:] == (bytes(64), "CU_MEM_HANDLE_TYPE_FABRIC")


def test_a_refusing_driver_raises_and_a_lacking_device_is_refused() -> None:
    driver = CudaDriver(
        _Bindings(cuMemCreate=_Result.CUDA_ERROR_OUT_OF_MEMORY), 0, HandleKind.FABRIC
    )
    with pytest.raises(ConfigError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.create(1 << 21)
    with pytest.raises(UnsupportedError, match="cuda:0 offers no"):
        CudaDriver(_Bindings(cuDeviceGetAttribute=0), 0, HandleKind.FILE_DESCRIPTOR)


def test_gpus_without_peer_access_are_refused_by_name() -> None:
    """Two devices, of which the second is the other rank's."""

    class Device:  # a new one at every call, equal to no other, as cuda-bindings makes them
        def __init__(self, index: int) -> None:
            self.index = index

    class TwoDevices(_Bindings):
        def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
            return _Result.CUDA_SUCCESS, Device(index)

        def cuDeviceGetUuid(self, device: Device) -> tuple[Any, ...]:
            return _Result.CUDA_SUCCESS, SimpleNamespace(bytes=bytes([device.index]))

    reach = TwoDevices(cuDeviceGetCount=2, cuDeviceCanAccessPeer=1)
    own, other = (CudaDriver(reach, index, HandleKind.FILE_DESCRIPTOR).uuid for index in range(2))
    CudaDriver(reach, 0, HandleKind.FILE_DESCRIPTOR).require_peer(other, 5)
    name, *devices = reach.calls[-1]
    assert name == "cuDeviceCanAccessPeer"
    assert [device.index for device in devices] == [0, 1]
    lacking = CudaDriver(TwoDevices(cuDeviceGetCount=2), 0, HandleKind.FILE_DESCRIPTOR)
    lacking.require_peer(own, 4)  # ranks may share a device
    lacking.require_peer("of another host", 6)
    with pytest.raises(UnsupportedError, match=r"cuda:0 has no peer access .* rank 5 \(cuda:1"):
        lacking.require_peer(other, 5)


def test_without_a_device_opening_one_says_so() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA device 99"):
        open_driver(99)
