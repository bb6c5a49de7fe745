"""Replica slots behind each layer's masters.

One pool of S slots per rank serves all layers in turn. Each layer still sees one contiguous
tensor of L + S experts per weight: its masters are moved to a mapping that ends on a page boundary,
and the pool's shared memory is mapped right behind it. A slot therefore costs its own bytes once.
Tensors of a layer with another size per expert get a region of their own in the pool.
"""

import mmap
import os

import torch

from ultraep_serve.balance.backend import LayerSlots
from ultraep_serve.balance.host.memory import (
    MAP_FIXED,
    READ_WRITE,
    map_memory,
    shareable_memory,
    tensor_at,
    unmap_memory,
)
from ultraep_serve.errors import ConfigError, UnsupportedError
from ultraep_serve.system.machine import available_memory

__all__ = ["HostSlotPool"]

_PAGE = mmap.PAGESIZE


class HostSlotPool:
    """This rank's replica slots: memory that other ranks write and every layer reads."""

    def __init__(self, num_slots: int, chunk_bytes: int, per_layer: bool = False) -> None:
        """Make a pool of ``num_slots`` slots. ``per_layer`` gives each layer slots of its own."""
        self.num_slots = num_slots
        self.size = 0  # bytes
        self.descriptor = shareable_memory("ultraep-slots")
        self._chunk_bytes = chunk_bytes
        self._per_layer = per_layer
        self._regions: dict[tuple[int, int, int], int] = {}
        self._mappings: list[tuple[int, int]] = []
        self._num_layers = 0

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        """Move one layer's expert tensors (L, ...) in front of the slots; returns the aliases.

        Raises UnsupportedError for tensors that cannot be moved, ConfigError when memory is short.
        """
        for tensor in masters:
            if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dim() < 1:
                raise UnsupportedError(
                    f"expert tensor {tuple(tensor.shape)} on {tensor.device} is not a contiguous "
                    "CPU tensor and cannot be copied slot by slot"
                )
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in masters]
        offsets = [self._region(index, size) for index, size in enumerate(sizes)]
        aliases = [
            self._alias(tensor, offset) for tensor, offset in zip(masters, offsets, strict=True)
        ]
        self._num_layers += 1
        return LayerSlots.of(aliases, offsets, sizes, self._chunk_bytes)

    def close(self) -> None:
        """Unmap everything. Tensors returned by ``adopt`` must not be used afterwards."""
        for address, size in self._mappings:
            unmap_memory(address, size)
        self._mappings.clear()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _region(self, index: int, expert_bytes: int) -> int:
        key = (index, expert_bytes, self._num_layers if self._per_layer else 0)
        if key not in self._regions:
            size = _round_up(self.num_slots * expert_bytes)
            _require_memory(size)
            self._regions[key] = self.size
            self.size += size
            os.ftruncate(self.descriptor, self.size)
        return self._regions[key]

    def _alias(self, masters: torch.Tensor, offset: int) -> torch.Tensor:
        master_bytes = masters.numel() * masters.element_size()
        slot_bytes = self.num_slots * masters[0].numel() * masters.element_size()
        front = _round_up(master_bytes)
        total = front + _round_up(slot_bytes)
        base = _map(0, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._mappings.append((base, total))
        if slot_bytes:
            shared = mmap.MAP_SHARED | MAP_FIXED
            _map(base + front, _round_up(slot_bytes), shared, self.descriptor, offset)
        start = base + front - master_bytes
        flat = tensor_at(start, master_bytes + slot_bytes, masters.dtype)
        alias = flat.view(masters.shape[0] + self.num_slots, *masters.shape[1:])
        alias[: masters.shape[0]].copy_(masters)
        alias[masters.shape[0] :].zero_()  # Linux puts a page on the node of who writes it first
        return alias


def map_pool(descriptor: int, size: int) -> int:
    """Address at which a pool's memory of ``size`` bytes is mapped for writing."""
    return _map(0, size, mmap.MAP_SHARED, descriptor, 0) if size else 0


def unmap(address: int, size: int) -> None:
    """Undo ``map_pool``."""
    if size:
        unmap_memory(address, size)


def _map(address: int, size: int, flags: int, descriptor: int, offset: int) -> int:
    try:
        return map_memory(address, size, READ_WRITE, flags, descriptor, offset)
    except OSError as error:
        raise ConfigError(
            f"cannot map {size} bytes for replica slots: {error.strerror}; use fewer slots"
        ) from error


def _require_memory(size: int) -> None:
    available = available_memory()
    if available is not None and size > available:
        raise ConfigError(
            f"replica slots need {size / 2**20:.0f} MiB, {available / 2**20:.0f} MiB are free; "
            "use fewer --slots"
        )


def _round_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
