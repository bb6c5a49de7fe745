"""Memory of a GPU that several ranks map, through cuda-bindings (extra ``cuda``).

They are imported when a driver is opened. All else knows ``Driver`` alone.
"""

import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch

from ultraep_serve.balance.memory import Driver, HandleKind, Shareable
from ultraep_serve.errors import ConfigError, DeviceError, UltraEPError, UnsupportedError


class CudaDriver(Driver):
    """``Driver`` over cuda-bindings."""

    def __init__(self, bindings: Any, device_index: int, kind: HandleKind) -> None:
        """``bindings`` is the module cuda.bindings.driver; use ``open_driver``."""
        self.device = torch.device("cuda", device_index)
        self.kind = kind
        self._api = bindings
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device_index)
        self.uuid = self._uuid_of(self._device)
        self._require_support(self._device)
        types = bindings.CUmemAllocationHandleType
        self._handle_type = (
            types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            if kind is HandleKind.FILE_DESCRIPTOR
            else types.CU_MEM_HANDLE_TYPE_FABRIC
        )
        self._properties = bindings.CUmemAllocationProp()
        self._properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.requestedHandleTypes = self._handle_type
        self._access = bindings.CUmemAccessDesc()
        self._access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for described in (self._properties, self._access):
            described.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            described.location.id = device_index
        minimum = bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            self._call("cuMemGetAllocationGranularity", self._properties, minimum)
        )

    def require_peer(self, uuid: str, rank: int) -> None:
        if uuid == self.uuid:  # CUDA has no answer for a device and itself
            return
        for index in range(int(self._call("cuDeviceGetCount"))):
            other = self._call("cuDeviceGet", index)
            if self._uuid_of(other) != uuid:
                continue
            if not self._call("cuDeviceCanAccessPeer", self._device, other):
                raise UnsupportedError(
                    f"{self.device} has no peer access to the memory of rank {rank} (cuda:{index} "
                    "here), which replica slots need"
                )

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, self.granularity, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int, is_shared: bool = True) -> int:  # all of it can be
        return int(self._call("cuMemCreate", size, self._properties, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def share(self, handle: int) -> Shareable:
        shared = self._call("cuMemExportToShareableHandle", handle, self._handle_type, 0)
        return int(shared) if self.kind is HandleKind.FILE_DESCRIPTOR else bytes(shared.data)

    def receive(self, shareable: Shareable) -> int:
        # a descriptor is passed by value, a fabric handle as a buffer
        return int(self._call("cuMemImportFromShareableHandle", shareable, self._handle_type))

    def tensor(self, address: int, size: int) -> torch.Tensor:
        # as bytes: bfloat16 and FP8 have no typestr
        window = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        wrapped = torch.as_tensor(
            SimpleNamespace(__cuda_array_interface__=window), device=self.device
        )
        if wrapped.data_ptr() != address:
            raise DeviceError(f"torch copied the memory at {address:#x} instead of wrapping it")
        return wrapped

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def reclaim(self) -> None:
        self.synchronize()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def _uuid_of(self, device: Any) -> str:
        return bytes(self._call("cuDeviceGetUuid", device).bytes).hex()

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._api, name)(*arguments)
        if error != self._api.CUresult.CUDA_SUCCESS:
            raise device_error(name, error.name)
        return values[0] if values else None

    def _require_support(self, device: Any) -> None:
        attributes = self._api.CUdevice_attribute
        memory = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        handles = (
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            if self.kind is HandleKind.FILE_DESCRIPTOR
            else attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        )
        for what, attribute in (("virtual memory", memory), (self.kind.value, handles)):
            if not self._call("cuDeviceGetAttribute", attribute, device):
                raise UnsupportedError(f"{self.device} offers no {what}, which replica slots need")


def open_driver(device_index: int, kind: HandleKind = HandleKind.FILE_DESCRIPTOR) -> CudaDriver:
    """The driver for torch's device ``cuda:device_index``.

    Raises UnsupportedError where there is no such device, no cuda-bindings or no support, which is
    tried out: without IMEX a device offers fabric handles and makes none.
    """
    if not torch.cuda.is_available() or device_index >= torch.cuda.device_count():
        raise UnsupportedError(f"no CUDA device {device_index}")
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            f"cuda-bindings cannot be imported ({error}); pip install '.[cuda]' in a checkout"
        ) from error
    torch.cuda.synchronize(device_index)  # the context that torch's kernels run in exists now
    driver = CudaDriver(bindings, device_index, kind)
    handle = driver.create(driver.granularity)
    try:
        shared = driver.share(handle)
    finally:
        driver.release(handle)
    if isinstance(shared, int):
        os.close(shared)
    return driver


def device_error(call: str, name: str) -> UltraEPError:
    """The error to raise where a driver's ``call`` returned the CUDA error ``name``."""
    if name == "CUDA_ERROR_OUT_OF_MEMORY":
        return ConfigError(
            f"{call}: {name}: not enough GPU memory for replica slots; use fewer --slots or leave "
            "the engine less of it"
        )
    if name == "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED":
        return UnsupportedError(f"{call}: {name}: this GPU does not reach another rank's memory")
    if name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED"):
        return UnsupportedError(
            f"{call}: {name}: this GPU or its set-up cannot share memory so (fabric handles need "
            "IMEX and its channel)"
        )
    return DeviceError(f"{call}: {name}")


def host_words(size: int, device: torch.device) -> torch.Tensor:
    """Return (size,) int32 in host memory that ``device`` reads and writes too."""
    return torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
