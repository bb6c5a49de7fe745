"""Shared memory for what ranks write, and memory for the weights and their copies."""

import json
import os
from collections import Counter
from pathlib import Path

from ultraep_serve.config import MOST_SLOT_PERCENT
from ultraep_serve.doctor.finding import Finding, Subject, error, ok, size, warning
from ultraep_serve.doctor.gpus import least_gpu_memory
from ultraep_serve.errors import MORE_SHARED_MEMORY, ConfigError
from ultraep_serve.launcher.engine import count_experts
from ultraep_serve.system.machine import available_memory, total_memory
from ultraep_serve.telemetry.record import record_dtype
from ultraep_serve.telemetry.ring import HEADER_BYTES, RING_RECORDS
from ultraep_serve.types import ExpertShape

_SHARED_MEMORY = Path("/dev/shm")
_ENGINE_BYTES = 704 << 20  # queues of the engine: vLLM reserves this much for two ranks
_PROCESS_BYTES = 448 << 20  # that a process of vLLM holds before it has a model
_TYPICAL_EXPERTS = 256
_TIGHT = 0.9  # of the memory; what is left is for the KV cache, activations and other processes
_MOST_HEADER = 64 << 20  # bytes


def check_shared_memory(subject: Subject, path: Path = _SHARED_MEMORY) -> Finding:
    """Size and free space of /dev/shm against what ranks and the engine write there."""
    name = "shared memory"
    remedy = MORE_SHARED_MEMORY
    if not os.access(path, os.W_OK | os.X_OK):
        return error(name, f"{path} is missing or cannot be written", remedy)
    status = os.statvfs(path)
    total, free = status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
    rings = ring_bytes(subject)
    seen = f"{path}: {size(free)} free of {size(total)}; records of {subject.ranks.here} ranks "
    seen += f"take {size(rings)}, queues of the engine up to {size(_ENGINE_BYTES)}"
    if free < rings:
        return error(name, seen, remedy)
    return ok(name, seen) if free >= rings + _ENGINE_BYTES else warning(name, seen, remedy)


def ring_bytes(subject: Subject) -> int:
    """Bytes of the rings of this host's ranks; for a typical model where none is given."""
    experts = (subject.model and count_experts(subject.model)) or _TYPICAL_EXPERTS
    shape = ExpertShape(subject.ranks.in_stage, experts, subject.config.slots)
    records = RING_RECORDS * record_dtype(shape).itemsize
    return subject.ranks.here * (HEADER_BYTES + records)


def check_memory(subject: Subject, available: int | None = None) -> list[Finding]:
    """Weights, slots and processes of this host against its memory; nothing without a model here.

    The KV cache and activations come on top. ``available`` in bytes; None: what this process may
    still take.
    """
    if subject.model is None:
        return []
    try:
        weights, expert, of_all_layers = checkpoint_bytes(subject.model)
    except ConfigError as reason:
        return [error("memory", str(reason), "mend it or fetch the model again")]
    weights = weights * subject.ranks.here // subject.ranks.total
    slots, kind = expert * subject.slots_here, ""
    if _is_per_layer(subject, of_all_layers):
        slots, kind = of_all_layers * subject.slots_here, " of each layer's own"
    available = available_memory() if available is None else available
    seen = f"weights {size(weights)} and slots{kind} {size(slots)} on this host"
    if available is None:
        remedy = "compare this with the machine's memory"
        return [warning("memory", f"{seen}; available memory is not known", remedy)]
    seen += f", {size(available)} available"
    number = subject.ranks.here + 2  # an engine's own, beside its ranks
    needed = weights + slots + number * _PROCESS_BYTES
    if needed > _TIGHT * available:
        seen += f"; {number} processes take {size(number * _PROCESS_BYTES)} more"
    if needed > available:
        return [error("memory", seen, "use a smaller model, fewer slots, or a larger machine")]
    if needed > _TIGHT * available:
        remedy = "little is left for the KV cache: use a larger machine"
        return [warning("memory", seen, remedy)]
    return [ok("memory", seen)]


def _is_per_layer(subject: Subject, expert_bytes: int) -> bool:
    """Whether each layer will have slots of its own; ``expert_bytes`` of one in every layer."""
    config, ranks = subject.config, subject.ranks
    if config.slot_memory != "auto":
        return config.slot_memory == "per_layer"
    memory = least_gpu_memory() or total_memory() // max(1, ranks.here)
    slots = config.slots * ranks.micro_batches
    return expert_bytes * slots <= memory * MOST_SLOT_PERCENT // 100


def checkpoint_bytes(model: str) -> tuple[int, int, int]:
    """Bytes of a local checkpoint's tensors, of its largest expert, and of one in every layer.

    All are 0 where the checkpoint is not in safetensors' format. Raises ConfigError.
    """
    folder = Path(model)
    sizes: Counter[str] = Counter()
    # Some checkpoints hold the same weights again under other names, in other files.
    for path in [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]:
        try:
            sizes.update(_tensors(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
            raise ConfigError(f"{path} is not in safetensors' format ({reason})") from reason
    layers: Counter[str] = Counter()
    for name, num_bytes in sizes.items():
        layer, of_experts, _ = name.partition(".experts.")
        if of_experts:
            layers[layer] += num_bytes
    experts = count_experts(model) or 1
    largest = max(layers.values(), default=0) // experts
    return sizes.total(), largest, layers.total() // experts


def _tensors(path: Path) -> dict[str, int]:
    """Bytes by name, as the file's header says: a length of 8 bytes, and so much JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    places = {name: tensor["data_offsets"] for name, tensor in header.items()}
    return {name: end - begin for name, (begin, end) in places.items()}
