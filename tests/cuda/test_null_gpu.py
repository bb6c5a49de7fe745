"""The null GPU's driver: memory is real, graphs are done when launched, and given kernels run."""

import ctypes
import os
import shutil
import sys
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="its headers are Triton's")
import torch
import triton
from ultraep_kernels.device.identity import identity
from ultraep_kernels.device.launch import _Config

from tests.support.offline import recorded_launches
from ultraep_serve.balance.physical import identity_table, master_ids

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler (gcc)"),
]
FOLDER = Path(__file__).parents[2] / "benchmarks" / "null_gpu"
PAGE = 2 << 20


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
        from null_libraries import LIBRARIES, build
    (library,) = build(
        Path(triton.__path__[0]).parent, tmp_path_factory.mktemp("null"), LIBRARIES[:1]
    )
    return ctypes.CDLL(str(library))


def mapped(driver: ctypes.CDLL, descriptor: int) -> "ctypes.Array[ctypes.c_char]":
    """A page that another process has made, at an address of its own."""
    handle, at = c_size_t(), c_size_t()
    posix = 1
    assert driver.cuMemImportFromShareableHandle(byref(handle), c_void_p(descriptor), posix) == 0
    assert driver.cuMemAddressReserve(byref(at), c_size_t(PAGE), c_size_t(0), None, 0) == 0
    assert driver.cuMemMap(at, c_size_t(PAGE), c_size_t(0), handle, 0) == 0
    assert at.value % PAGE == 0
    return (ctypes.c_char * PAGE).from_address(at.value)


def test_what_is_mapped_twice_is_the_same_memory(driver: ctypes.CDLL) -> None:
    handle, shared = c_size_t(), c_int()
    assert driver.cuMemCreate(byref(handle), c_size_t(PAGE), None, 0) == 0
    assert driver.cuMemExportToShareableHandle(byref(shared), handle, 1, 0) == 0
    one, other = mapped(driver, shared.value), mapped(driver, shared.value)
    one[5] = b"x"
    assert other[5] == b"x"
    os.close(shared.value)


def test_a_graph_does_its_work_whenever_it_is_launched(driver: ctypes.CDLL) -> None:
    source, target = (ctypes.c_int * 4)(1, 2, 3, 4), (ctypes.c_int * 4)()
    driver.null_gpu_begin_capture()
    assert driver.cuMemcpyAsync(target, source, c_size_t(16), None) == 0
    driver.null_gpu_end_capture.restype = c_void_p
    graph = c_void_p(driver.null_gpu_end_capture())
    assert list(target) == [0, 0, 0, 0]
    source[0] = 7
    driver.null_gpu_run_graph(graph)
    assert list(target) == [7, 2, 3, 4]
    driver.null_gpu_free_graph(graph)


def test_what_is_allocated_in_a_capture_stays_for_the_graph(driver: ctypes.CDLL) -> None:
    at = c_size_t()
    driver.null_gpu_begin_capture()
    assert driver.cuMemAlloc_v2(byref(at), c_size_t(16)) == 0
    assert driver.cuMemsetD32Async(at, 7, c_size_t(4), None) == 0
    driver.null_gpu_end_capture.restype = c_void_p
    graph = c_void_p(driver.null_gpu_end_capture())
    assert driver.cuMemFree_v2(at) == 0
    driver.null_gpu_run_graph(graph)
    assert list((c_int * 4).from_address(at.value)) == [7] * 4
    driver.null_gpu_free_graph(graph)


def test_nobody_waits_while_a_graph_is_captured(driver: ctypes.CDLL) -> None:
    assert driver.cuStreamSynchronize(None) == 0
    driver.null_gpu_begin_capture()
    assert driver.cuStreamSynchronize(None) == 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    driver.null_gpu_end_capture.restype = c_void_p
    driver.null_gpu_free_graph(c_void_p(driver.null_gpu_end_capture()))


def test_a_kernel_that_is_handed_over_is_executed_and_others_are_not(driver: ctypes.CDLL) -> None:
    from tests.ptx.compiled import prepare
    from tests.ptx.machine import kernel_of

    ids = torch.tensor([[0, 3], [7, -1], [4, 5]], dtype=torch.int32)
    with recorded_launches() as launches:
        found = identity(ids, 8, 4, 2)
    found.fill_(-9)
    prepared = prepare(launches[0])
    function = c_void_p()
    assert driver.cuModuleGetFunction(byref(function), None, b"identity") == 0
    places = [(offset, size) for _, offset, size in prepared.kernel.parameters]
    values = [ctypes.c_uint64(value & 2**64 - 1) for value in prepared.values]
    pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))

    def launch() -> None:
        config = _Config(prepared.grid, 1, 1, 32 * prepared.num_warps, 1, 1)
        assert driver.cuLaunchKernelEx(byref(config), function, pointers, None) == 0

    launch()
    assert bool((found == -9).all())
    kernel, _kept = kernel_of(prepared.kernel, prepared.shared_bytes)
    parameters = (c_int * (2 * len(places)))(*(number for place in places for number in place))
    driver.null_gpu_execute(function, byref(kernel), parameters, len(places))
    launch()
    expected = master_ids(ids, torch.from_numpy(identity_table(8, 2, 2)))
    assert torch.equal(found, expected.int())
