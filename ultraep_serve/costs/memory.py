"""What replicas cost in memory: slots that all layers share, against redundant experts in each."""

from dataclasses import dataclass

from ultraep_serve.costs.shapes import ModelShape

__all__ = ["SlotMemory", "slot_memory"]


@dataclass(frozen=True)
class SlotMemory:
    """Bytes per rank of ``slots`` replica slots."""

    slots: int
    bytes_per_expert: int
    shared: int  # one pool for all layers
    per_layer: int  # a copy in every MoE layer, as redundant experts are
    kv_tokens: int  # tokens of KV cache that the difference would hold, MLA or GQA in BF16


def slot_memory(shape: ModelShape, slots: int, weight_type: str) -> SlotMemory:
    """Memory of ``slots`` per rank. It does not depend on the number of ranks."""
    expert = shape.expert_bytes(weight_type)
    shared = slots * expert
    per_layer = shared * shape.num_moe_layers
    return SlotMemory(
        slots=slots,
        bytes_per_expert=expert,
        shared=shared,
        per_layer=per_layer,
        kv_tokens=(per_layer - shared) // shape.kv_bytes_per_token,
    )
