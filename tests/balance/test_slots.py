"""HostSlotPool: one pool behind every layer's masters."""

import errno
import os

import numpy as np
import pytest
import torch

from ultraep_serve.balance.backend import LayerSlots
from ultraep_serve.balance.host import slots as slots_module
from ultraep_serve.balance.host.memory import tensor_at
from ultraep_serve.balance.host.slots import HostSlotPool, map_pool, unmap
from ultraep_serve.errors import ConfigError, UnsupportedError

MASTERS, SLOTS, CHUNK = 3, 2, 4096
SHAPES = {  # per expert; bytes that are and are not multiples of a page
    "page": ((32, 32), torch.float32),
    "odd": ((7, 13), torch.float32),
    "bfloat16": ((33, 5), torch.bfloat16),
    "packed": ((17, 3, 11), torch.uint8),
    "bias": ((5,), torch.float32),
    "scalar": ((), torch.float32),
}


def tensors(seed: int, names: tuple[str, ...] = tuple(SHAPES)) -> list[torch.Tensor]:
    """Masters (L, ...) of random bytes."""
    rng = np.random.default_rng(seed)
    made = []
    for name in names:
        shape, dtype = SHAPES[name]
        item = torch.empty((), dtype=dtype).element_size()
        data = rng.integers(0, 256, size=MASTERS * int(np.prod(shape)) * item, dtype=np.uint8)
        made.append(torch.from_numpy(data).view(dtype).view(MASTERS, *shape))
    return made


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def shared_bytes(pool: HostSlotPool) -> int:
    """What the pool really occupies."""
    return os.fstat(pool.descriptor).st_blocks * 512


def fill(layer: LayerSlots, value: int) -> None:
    for tensor in layer.tensors:
        bytes_of(tensor[MASTERS:]).fill_(value)


@pytest.mark.parametrize("per_layer", [False, True])
def test_masters_keep_their_bytes_and_experts_are_contiguous(per_layer: bool) -> None:
    pool = HostSlotPool(SLOTS, CHUNK, per_layer)
    for seed in range(3):
        masters = tensors(seed)
        layer = pool.adopt(masters)
        for master, alias in zip(masters, layer.tensors, strict=True):
            assert alias.shape == (MASTERS + SLOTS, *master.shape[1:])
            assert alias.is_contiguous()
            assert alias.dtype == master.dtype
            assert torch.equal(bytes_of(alias[:MASTERS]), bytes_of(master))
        fill(layer, 0xAB)
        for master, alias in zip(masters, layer.tensors, strict=True):
            assert torch.equal(bytes_of(alias[:MASTERS]), bytes_of(master))
    pool.close()


def test_a_slot_written_through_one_layer_is_seen_through_the_others() -> None:
    pool = HostSlotPool(SLOTS, CHUNK)
    layers = [pool.adopt(tensors(seed)) for seed in range(3)]
    for index, tensor in enumerate(layers[0].tensors):
        bytes_of(tensor[MASTERS + 1]).fill_(index + 1)
    for layer in layers:
        for index, tensor in enumerate(layer.tensors):
            assert (bytes_of(tensor[MASTERS + 1]) == index + 1).all()
            assert (bytes_of(tensor[MASTERS]) == 0).all()
    pool.close()


def test_per_layer_slots_are_apart() -> None:
    pool = HostSlotPool(SLOTS, CHUNK, per_layer=True)
    layers = [pool.adopt(tensors(seed)) for seed in range(3)]
    for value, layer in enumerate(layers):
        fill(layer, value + 1)
    for value, layer in enumerate(layers):
        assert all((bytes_of(t[MASTERS:]) == value + 1).all() for t in layer.tensors)
    pool.close()


def test_another_mapping_writes_where_region_offsets_say() -> None:
    """What other ranks do: write slot s of tensor n at region + s * bytes."""
    pool = HostSlotPool(SLOTS, CHUNK)
    layers = [pool.adopt(tensors(seed)) for seed in range(2)]
    address = map_pool(pool.descriptor, pool.size)
    view = tensor_at(address, pool.size, torch.uint8)
    for index, size in enumerate(layers[0].expert_bytes.tolist()):
        start = int(layers[0].region_offsets[index]) + size
        view[start : start + size] = index + 100
        for layer in layers:
            assert (bytes_of(layer.tensors[index][MASTERS + 1]) == index + 100).all()
    del view
    unmap(address, pool.size)
    pool.close()


def test_layers_of_different_sizes_get_regions_of_their_own() -> None:
    pool = HostSlotPool(SLOTS, CHUNK)
    one = pool.adopt(tensors(0, ("page", "bias")))
    other = pool.adopt(tensors(1, ("odd", "bias")))
    assert one.region_offsets[0] != other.region_offsets[0]
    assert one.region_offsets[1] == other.region_offsets[1]
    fill(one, 1)
    assert (bytes_of(other.tensors[0][MASTERS:]) == 0).all()
    pool.close()


def test_chunks_cover_every_byte_once() -> None:
    pool = HostSlotPool(SLOTS, 1000)
    layer = pool.adopt(tensors(0))
    for index, size in enumerate(layer.expert_bytes.tolist()):
        mine = layer.chunks[layer.chunks[:, 0] == index]
        assert mine[:, 1].tolist() == list(range(0, size, 1000))
        assert mine[:, 2].sum() == size
        assert mine[:, 2].min() > 0
    pool.close()


def test_without_slots_there_is_no_pool() -> None:
    pool = HostSlotPool(0, CHUNK)
    masters = tensors(0)
    layer = pool.adopt(masters)
    for master, alias in zip(masters, layer.tensors, strict=True):
        assert torch.equal(bytes_of(alias), bytes_of(master))
    assert pool.size == shared_bytes(pool) == 0
    pool.close()


def test_slots_cost_their_bytes_once_however_many_layers() -> None:
    pool = HostSlotPool(SLOTS, CHUNK)
    masters = [torch.ones(MASTERS, 256, 1024)]  # 1 MiB per expert
    layers = [pool.adopt(masters) for _ in range(8)]
    for layer in layers:
        fill(layer, 1)
    assert pool.size == shared_bytes(pool) == SLOTS << 20
    rounding = 8 * 1024  # smaps gives each mapping's part in KiB
    file = os.fstat(pool.descriptor).st_ino
    assert 0 <= (SLOTS << 20) - resident_bytes_of(file) <= rounding
    pool.close()
    assert resident_bytes_of(file) == 0


def resident_bytes_of(file: int) -> int:
    """Resident memory of mappings of an inode; a page that n of them share counts 1/n in each."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(" ")[0]:
                inside = line.split()[4] == str(file)
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def test_more_slots_than_memory_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "available_memory", lambda: 10_000)
    pool = HostSlotPool(3, CHUNK)
    with pytest.raises(ConfigError, match="--slots"):
        pool.adopt(tensors(0, ("page",)))
    pool.close()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 8, 4).transpose(1, 2),
        torch.zeros(3, 8, 4, device="meta"),
        torch.zeros(()),
    ],
    ids=["not contiguous", "not on CPU", "no experts"],
)
def test_what_cannot_be_moved_is_refused(tensor: torch.Tensor) -> None:
    pool = HostSlotPool(SLOTS, CHUNK)
    with pytest.raises(UnsupportedError, match="contiguous CPU tensor"):
        pool.adopt([tensors(0)[0], tensor])
    assert pool.size == 0
    pool.close()


def test_closing_twice_closes_nobody_elses_file(tmp_path: os.PathLike[str]) -> None:
    pool = HostSlotPool(SLOTS, CHUNK)
    number = pool.descriptor
    pool.close()
    other = os.open(tmp_path, os.O_RDONLY)
    assert other == number
    pool.close()
    os.close(other)


def test_experts_are_computed_from_aliases_as_from_plain_tensors() -> None:
    """A kernel must not care that the memory behind its weights is mapped twice."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(MASTERS, 24, 40, generator=generator)
    x = torch.randn(9, 40, generator=generator)
    pool = HostSlotPool(SLOTS, CHUNK)
    alias = pool.adopt([weight]).tensors[0]
    alias[MASTERS:] = weight[:SLOTS]
    expected = torch.einsum("th,eih->eti", x, torch.cat([weight, weight[:SLOTS]]))
    torch.testing.assert_close(torch.einsum("th,eih->eti", x, alias), expected)
    del alias
    pool.close()


def test_a_sandbox_that_refuses_shared_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(ConfigError, match=r"memfd_create is refused \(Operation .*seccomp profile"):
        HostSlotPool(2, chunk_bytes=4096)
