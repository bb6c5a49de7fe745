"""SlotPool over a driver that checks every call, and over memory of the host."""

import errno
import os
from collections.abc import Iterator
from math import prod

import pytest
import torch

from tests.support.host_driver import HostDriver
from ultraep_serve.balance.host.memory import HostMemory
from ultraep_serve.balance.memory import MappedMemory, round_up
from ultraep_serve.balance.slots import ALIGNMENT, LayerSlots, SlotPool
from ultraep_serve.errors import ConfigError, UnsupportedError

MASTERS, SLOTS, CHUNK = 3, 2, 4096
SHAPES = {  # per expert, beside a granularity of 64 KiB
    "weight": ((256, 256), torch.bfloat16),  # two units: mapped behind each layer's masters
    "padded": ((300, 128), torch.bfloat16),  # masters do not fill their units
    "fp8": ((512, 128), torch.float8_e4m3fn),
    "unaligned": ((401, 301), torch.bfloat16),  # large, but would start at an odd address: packed
    "scales": ((7, 13), torch.float32),  # small: packed
    "bias": ((5,), torch.bfloat16),
    "scalar": ((), torch.float32),
    "empty": ((0,), torch.int32),  # some quantisations keep such
}
ALIASED = ("weight", "padded", "fp8")


def tensors(seed: int, names: tuple[str, ...] = tuple(SHAPES)) -> list[torch.Tensor]:
    """Masters (L, ...) of random bytes, in storages of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name in names:
        shape, dtype = SHAPES[name]
        size = MASTERS * prod(shape) * dtype.itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        made.append(data.view(dtype).view(MASTERS, *shape))
    return made


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def adopt(pool: SlotPool, seed: int, names: tuple[str, ...]) -> LayerSlots:
    return pool.adopt(tensors(seed, names))


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver()
    yield made
    made.require_clean()


@pytest.fixture
def pool(driver: HostDriver, request: pytest.FixtureRequest) -> Iterator[SlotPool]:
    """With slots behind the masters of all layers in turn, or of each layer apart."""
    made = SlotPool(driver, SLOTS, CHUNK, per_layer=getattr(request, "param", False))
    yield made
    made.close()
    made.close()  # once is enough
    assert made.slot_bytes == 0


@pytest.mark.parametrize("pool", [False, True], indirect=True, ids=["shared", "per layer"])
def test_slots_cost_what_is_beyond_the_masters(pool: SlotPool, driver: HostDriver) -> None:
    masters = 0
    for seed in range(3):
        for names in (tuple(SHAPES), ("scales",)):
            masters += sum(bytes_of(tensor).numel() for tensor in tensors(seed, names))
            pool.adopt(tensors(seed, names))
            assert pool.slot_bytes == driver.live_bytes - masters


@pytest.mark.parametrize("pool", [False, True], indirect=True, ids=["shared", "per layer"])
def test_masters_keep_their_bytes_and_start_aligned(pool: SlotPool) -> None:
    layers = [pool.adopt(tensors(seed)) for seed in range(3)]
    for alias in (alias for layer in layers for alias in layer.tensors):
        bytes_of(alias[MASTERS:]).fill_(0xAB)
    for seed, layer in enumerate(layers):
        for master, alias in zip(tensors(seed), layer.tensors, strict=True):
            assert alias.shape == (MASTERS + SLOTS, *master.shape[1:])
            assert alias.is_contiguous()
            assert alias.dtype == master.dtype
            assert alias.data_ptr() % ALIGNMENT == 0
            assert torch.equal(bytes_of(alias[:MASTERS]), bytes_of(master))


def test_one_memory_lies_behind_every_layers_masters(pool: SlotPool, driver: HostDriver) -> None:
    layers = [adopt(pool, seed, ALIASED) for seed in range(60)]
    behind = {}
    for layer in layers:
        for index, alias in enumerate(layer.tensors):
            boundary = alias[MASTERS:].data_ptr()
            assert boundary % driver.granularity == 0
            behind.setdefault(index, set()).add(driver.mapped[boundary][1])
    memories = [memory for used in behind.values() for memory in used]
    assert len(memories) == len(ALIASED)
    descriptors = (driver.handles[region.handle].descriptor for region in pool.regions)
    assert memories == [os.fstat(descriptor).st_ino for descriptor in descriptors]
    sizes = [bytes_of(tensor[0]).numel() for tensor in layers[0].tensors]
    assert pool.size == sum(round_up(SLOTS * size, driver.granularity) for size in sizes)
    for index, alias in enumerate(layers[0].tensors):
        alias[MASTERS + 1].view(torch.uint8).fill_(index + 1)
    for layer in layers:
        for index, alias in enumerate(layer.tensors):
            assert (alias[MASTERS + 1].view(torch.uint8) == index + 1).all()
            assert (alias[MASTERS].view(torch.uint8) == 0).all()


@pytest.mark.parametrize("pool", [False, True], indirect=True, ids=["shared", "per layer"])
def test_other_ranks_write_where_chunks_say(pool: SlotPool, driver: HostDriver) -> None:
    """They map the regions one after another and write slot s at region + s * bytes."""
    layers = [pool.adopt(tensors(seed)) for seed in range(2)]
    theirs = MappedMemory(driver, pool.regions)
    assert theirs.size == pool.size
    view = driver.tensor(theirs.address, theirs.size)
    for value, layer in enumerate(layers, 100):
        chunks = [*enumerate(layer.chunks.tolist(), value)]
        for number, (_, region, stride, size) in chunks:
            view[region + stride : region + stride + size] = number % 256
        for number, (master, _, stride, size) in chunks:
            there = driver.tensor(master + (MASTERS + 1) * stride, size)
            assert (there == number % 256).all()
        sizes = [bytes_of(tensor[0]).numel() for tensor in layer.tensors]
        assert layer.bytes_per_expert == sum(sizes)
    for seed, layer in enumerate(layers):
        for master, alias in zip(tensors(seed), layer.tensors, strict=True):
            assert torch.equal(bytes_of(alias[:MASTERS]), bytes_of(master))
    del view
    theirs.close()


def test_memory_is_never_needed_twice(pool: SlotPool, driver: HostDriver) -> None:
    layers = [tensors(seed, ("weight",) * 4) for seed in range(5)]
    master_bytes = layers[0][0].nbytes
    peak, create = 0, driver.create

    def watched(size: int, is_shared: bool = True) -> int:
        nonlocal peak
        handle = create(size, is_shared)
        held = sum(tensor.untyped_storage().nbytes() for layer in layers for tensor in layer)
        peak = max(peak, driver.live_bytes + held)
        return handle

    driver.create = watched  # type: ignore[method-assign]
    for layer in layers:
        pool.adopt(layer)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in layer)
    assert peak == 20 * master_bytes + pool.size + master_bytes  # all, the slots, one being moved


def test_storage_that_others_live_in_is_left_alone(pool: SlotPool) -> None:
    whole = torch.arange(2 * MASTERS * 100.0).view(2, MASTERS, 100)
    pool.adopt([whole[0]])
    assert whole[1, 0, 0] == 300.0
    twice = torch.arange(MASTERS * 100.0).view(MASTERS, 100)
    layer = pool.adopt([twice, twice.view(torch.int32)])
    assert torch.equal(layer.tensors[0][:MASTERS], layer.tensors[1][:MASTERS].view(torch.float32))


def test_experts_may_be_laid_out_in_any_order_inside(pool: SlotPool) -> None:
    """Block scales of FP8 are kept column by column, with rows filled up to a multiple of four."""
    rows, columns, filled = 14, 9, 16
    storage = torch.randn(MASTERS, columns, filled)
    scales = storage[:, :, :rows].transpose(1, 2)
    expected = scales.clone()
    alias = pool.adopt([scales]).tensors[0]
    assert alias.shape == (MASTERS + SLOTS, rows, columns)
    assert alias.stride() == (columns * filled, 1, filled)
    assert torch.equal(alias[:MASTERS], expected)
    alias[MASTERS:] = 1
    assert torch.equal(alias[:MASTERS], expected)


def test_without_slots_nothing_moves() -> None:
    driver = HostDriver()
    pool = SlotPool(driver, 0, CHUNK)
    masters = tensors(0)
    addresses = [tensor.data_ptr() for tensor in masters]
    layer = pool.adopt(masters)
    assert [tensor.data_ptr() for tensor in layer.tensors] == addresses
    assert torch.equal(bytes_of(layer.tensors[0]), bytes_of(tensors(0)[0]))
    assert pool.size == 0
    assert driver.calls == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 3, 4).transpose(0, 1),
        torch.zeros(1).expand(3),
        torch.zeros(3, 8, 4, device="meta"),
        torch.zeros(()),
        torch.zeros(0, 4),
    ],
    ids=["experts overlap", "one value", "on another device", "no experts", "no masters"],
)
def test_what_cannot_be_moved_is_refused_before_anything_moves(
    pool: SlotPool, driver: HostDriver, tensor: torch.Tensor
) -> None:
    other = tensors(0)[0]
    with pytest.raises(UnsupportedError, match="one expert after another"):
        pool.adopt([other, tensor])
    assert other.untyped_storage().nbytes() == other.nbytes
    assert driver.calls == []


def test_whatever_fails_leaves_nothing_behind() -> None:
    """Two layers of all kinds of tensors, with every single call failing once."""

    def build(driver: HostDriver) -> None:
        pool = SlotPool(driver, SLOTS, CHUNK)
        try:
            for seed in range(2):
                pool.adopt(tensors(seed))
        finally:
            pool.close()

    whole = HostDriver()
    build(whole)
    assert len(whole.calls) > 30
    for fail_at in range(1, len(whole.calls) + 1):
        driver = HostDriver(fail_at=fail_at)
        with pytest.raises(ConfigError, match="fewer --slots"):
            build(driver)
        driver.require_clean()


def test_more_slots_than_memory_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultraep_serve.balance.host.memory.available_memory", lambda: 10_000)
    pool = SlotPool(HostMemory(), 3, CHUNK)
    with pytest.raises(ConfigError, match="--slots"):
        pool.adopt(tensors(0, ("weight",)))
    pool.close()


def test_a_sandbox_that_refuses_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(ConfigError, match=r"memfd_create is refused \(Operation .*seccomp profile"):
        SlotPool(HostMemory(), SLOTS, CHUNK).adopt(tensors(0))
