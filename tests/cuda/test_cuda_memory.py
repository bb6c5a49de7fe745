"""MappedMemory and CudaDriver's errors, without a GPU: host memory stands in for the device's."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from ultraep_serve.balance.cuda.driver import CudaDriver, device_error, open_driver
from ultraep_serve.balance.memory import HandleKind
from ultraep_serve.errors import ConfigError, DeviceError, UnsupportedError


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
        self.answers |= {"cuDeviceGetUuid": SimpleNamespace(bytes=bytes(16)), **answers}
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
