"""Replica slots behind each layer's masters, in the memory of the host or of a GPU.

One pool of S slots per rank serves all layers in turn, and each layer still sees one tensor of
L + S experts per weight. Masters are copied to memory of their own that ends on a granularity
boundary (2 MiB on today's GPUs, a page on the host), and the pool's memory is mapped right behind
it: a slot costs its bytes once for all layers.

    reserved range of one tensor:  [ padding | masters (L) ][ slots (S) | padding ]
    memory behind it:                this layer's own         the pool's, in every layer

Two kinds of tensors are packed instead: masters and slots together in memory that only this layer
uses. Small ones (scales, biases), where the slots cost less than the padding would, and those whose
masters, put before a boundary, would not start aligned as kernels expect (TMA).
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ultraep_serve.balance.memory import Allocation, Driver, MappedMemory, create, round_up
from ultraep_serve.errors import UnsupportedError

ALIGNMENT = 128  # bytes, of a tensor's start; TMA asks for 16, and for 128 in shared memory
_ARENA_UNITS = 16  # granularities of memory that packed tensors share


@dataclass(frozen=True)
class LayerSlots:
    """Where one layer's expert tensors lie; N tensors make up an expert."""

    tensors: list[torch.Tensor]  # N tensors (L + S, ...), masters first
    # (C, 4) units of transfer: where each lies in the first master; bytes from the start of every
    # rank's pool to it in slot 0; bytes from one expert to the next; its size
    chunks: NDArray[np.int64]

    @cached_property
    def bytes_per_expert(self) -> int:
        return int(self.chunks[:, 3].sum())

    @classmethod
    def of(
        cls, tensors: list[torch.Tensor], offsets: list[int], sizes: list[int], chunk_bytes: int
    ) -> "LayerSlots":
        """Describe adopted ``tensors``: ``offsets`` of slot 0 in the pool, ``sizes`` of experts."""
        chunks = [
            (tensor.data_ptr() + start, offset + start, size, min(chunk_bytes, size - start))
            for tensor, offset, size in zip(tensors, offsets, sizes, strict=True)
            for start in range(0, size, chunk_bytes)
        ]
        return cls(tensors, np.array(chunks, dtype=np.int64).reshape(-1, 4))


@dataclass(frozen=True)
class _TensorLayout:
    num_masters: int  # L
    expert_bytes: int  # from one expert to the next; 0 where an expert has no elements
    strides: tuple[int, ...]  # counted in elements

    @property
    def master_bytes(self) -> int:
        return self.num_masters * self.expert_bytes


@dataclass
class _Arena:
    """Memory for packed tensors, filled from the start."""

    address: int
    offset: int  # where it begins within the pool
    size: int
    used: int = 0


class SlotPool:
    """This rank's replica slots: memory that other ranks write and every layer reads."""

    def __init__(
        self, driver: Driver, num_slots: int, chunk_bytes: int, per_layer: bool = False
    ) -> None:
        """Make a pool of ``num_slots`` slots. ``per_layer`` gives each layer slots of its own."""
        self.driver, self.num_slots = driver, num_slots
        self.regions: list[Allocation] = []  # one after another, as every rank maps them
        self._chunk_bytes = chunk_bytes
        self._per_layer = per_layer
        self._shared: dict[tuple[int, int, int], tuple[Allocation, int]] = {}
        self._arena = _Arena(address=0, offset=0, size=0)
        self._num_layers = 0
        self._extra_bytes = 0
        self._undo = ExitStack()

    @property
    def slot_bytes(self) -> int:
        """Bytes that the slots cost: all memory made here, without the masters in it."""
        return self.size + self._extra_bytes

    @property
    def size(self) -> int:
        """Bytes of the pool as other ranks map it, packed masters among them."""
        return sum(region.size for region in self.regions)

    def adopt(self, masters: list[torch.Tensor]) -> LayerSlots:
        """Move one layer's expert tensors (L, ...) in front of the slots; returns the aliases.

        Tensor by tensor, each one's old storage is emptied once it is copied, so that there is
        never room needed for two layers; without slots they stay where they are. Experts need
        not be contiguous inside, but must follow each other without overlap.
        Raises UnsupportedError for tensors that cannot be moved, before any is; ConfigError when
        memory is short, DeviceError when the driver fails: tensors may have moved by then, and
        the model cannot be used any more.
        """
        layouts = [self._layout_of(tensor) for tensor in masters]
        sizes = [layout.expert_bytes for layout in layouts]
        aliases, offsets = masters, [0] * len(masters)
        if self.num_slots:
            aliases, offsets = self._move_all(masters, layouts)
        self._num_layers += 1
        return LayerSlots.of(aliases, offsets, sizes, self._chunk_bytes)

    def close(self) -> None:
        """Unmap and release everything. Tensors returned by ``adopt`` must not be used any more."""
        self._undo.close()
        self.regions.clear()
        self._shared.clear()
        self._extra_bytes = 0
        self._arena = _Arena(address=0, offset=0, size=0)

    def _layout_of(self, tensor: torch.Tensor) -> _TensorLayout:
        if tensor.device == self.driver.device and tensor.dim() and tensor.shape[0]:
            inner = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
            numel = tensor[0].numel()
            extent = 1 + sum((length - 1) * stride for length, stride in inner) if numel else 0
            step = tensor.stride(0) if tensor.shape[0] > 1 else extent
            if numel == 0 or numel <= extent <= step:
                size = (step if numel else 0) * tensor.element_size()
                return _TensorLayout(tensor.shape[0], size, (step, *tensor.stride()[1:]))
        raise UnsupportedError(
            f"expert tensor {tuple(tensor.shape)} with strides {tensor.stride()} on "
            f"{tensor.device} does not hold one expert after another on {self.driver.device} "
            "and cannot be copied slot by slot"
        )

    def _move_all(
        self, masters: list[torch.Tensor], layouts: list[_TensorLayout]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Aliases and the offset of each one's slot 0 within the pool."""
        storages = [tensor.untyped_storage().data_ptr() for tensor in masters]
        aliases, offsets = [], []
        self.driver.reclaim()
        for index, (tensor, layout) in enumerate(zip(masters, layouts, strict=True)):
            alias, offset = self._move(index, tensor, layout)
            aliases.append(alias)
            offsets.append(offset)
            storage = tensor.untyped_storage()
            alone = storages.count(storages[index]) == 1 and storage.nbytes() <= layout.master_bytes
            if alone and storage.resizable():  # no other tensor lives there
                storage.resize_(0)
                self.driver.reclaim()
        return aliases, offsets

    def _move(
        self, index: int, masters: torch.Tensor, layout: _TensorLayout
    ) -> tuple[torch.Tensor, int]:
        """Copy masters in front of the slots; return the alias and slot 0's offset in the pool."""
        shape = (layout.num_masters + self.num_slots, *masters.shape[1:])
        if layout.expert_bytes == 0:
            return masters.new_empty(shape), 0
        place = self._pack if self._is_packed(layout) else self._alias
        address, offset = place(index, layout)
        self._extra_bytes -= layout.master_bytes
        size = (layout.num_masters + self.num_slots) * layout.expert_bytes
        window = self.driver.tensor(address, size)
        alias = window.view(masters.dtype).as_strided(shape, layout.strides)
        alias[: layout.num_masters].copy_(masters)
        # Linux puts a page on the node of who writes it first
        window[layout.master_bytes :].zero_()
        return alias, offset

    def _is_packed(self, layout: _TensorLayout) -> bool:
        padding = -layout.master_bytes % self.driver.granularity
        slots_cost_less = self.num_slots * layout.expert_bytes <= padding
        return slots_cost_less or layout.master_bytes % ALIGNMENT != 0

    def _alias(self, index: int, layout: _TensorLayout) -> tuple[int, int]:
        """Map the pool behind masters; return their address and slot 0's offset in the pool."""
        key = index, layout.expert_bytes, self._num_layers if self._per_layer else 0
        if key not in self._shared:
            self._shared[key] = self._grow(self.num_slots * layout.expert_bytes)
        region, offset = self._shared[key]
        with ExitStack() as undo:
            front = create(self.driver, layout.master_bytes, undo, is_shared=False)
            self._extra_bytes += front.size
            mapped = MappedMemory(self.driver, [front, region])
            undo.callback(mapped.close)
            self._undo.callback(undo.pop_all().close)
        return mapped.address + front.size - layout.master_bytes, offset

    def _pack(self, index: int, layout: _TensorLayout) -> tuple[int, int]:
        """Put masters and slots side by side; return the masters' address and slot 0's offset."""
        size = layout.master_bytes + self.num_slots * layout.expert_bytes
        if self._arena.size - self._arena.used < size:
            region, offset = self._grow(max(size, _ARENA_UNITS * self.driver.granularity))
            mapped = MappedMemory(self.driver, [region])
            self._undo.callback(mapped.close)
            self._arena = _Arena(mapped.address, offset, region.size)
        start = self._arena.used
        self._arena.used = round_up(start + size, ALIGNMENT)
        return self._arena.address + start, self._arena.offset + start + layout.master_bytes

    def _grow(self, size: int) -> tuple[Allocation, int]:
        """Return new memory at the end of the pool, and its offset."""
        offset = self.size
        self.regions.append(create(self.driver, size, self._undo))
        return self.regions[-1], offset
