"""Watch the routers of a transformers model: which experts a text chooses, layer by layer."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ultraep_serve.testing.spec import ModelSpec
from ultraep_serve.types import IntArray

__all__ = ["expert_loads", "load_ids"]


def load_ids(path: str | Path, texts: Sequence[str]) -> Tensor:
    """Token ids (N, T) of N texts of equal length, by the tokenizer stored in ``path``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return torch.tensor([tokenizer.encode(text) for text in texts])


def expert_loads(model: Any, ids: Tensor, spec: ModelSpec) -> dict[int, IntArray]:
    """Assignments per expert (E,) of each MoE layer, by decoder layer index, for ``ids`` (N, T)."""
    loads: dict[int, IntArray] = {}

    def counting(layer: int) -> Callable[[Any, Any, tuple[Tensor, ...]], None]:
        def count(_module: Any, _args: Any, output: tuple[Tensor, ...]) -> None:
            chosen = output[2].flatten().bincount(minlength=spec.num_experts)
            loads[layer] = chosen.numpy().astype(np.int32)

        return count

    with ExitStack() as hooks, torch.inference_mode():
        for layer in spec.moe_layers:
            gate = model.model.layers[layer].mlp.gate
            hooks.callback(gate.register_forward_hook(counting(layer)).remove)
        model.model(ids, use_cache=False)
    return loads
