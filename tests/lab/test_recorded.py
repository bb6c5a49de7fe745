"""The checkpoint that routes as recorded, by transformers in bfloat16; and benchmarks/routed.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ultraep_lab.demo.recorded import RecordedSpec, make_recorded_model, recorded_text

SPEC = RecordedSpec(
    num_experts=16,
    content_size=64,
    moe_intermediate_size=32,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


def recorded_ids(tokens: int, layers: int, chosen: int) -> np.ndarray:
    """Made-up ids (tokens, layers, chosen), some experts much more often than others."""
    chooser = np.random.default_rng(0)
    favour = np.linspace(0, 3, SPEC.num_experts)
    noise = chooser.gumbel(size=(tokens, layers, SPEC.num_experts)) + favour
    return noise.argsort(axis=-1)[..., : -chosen - 1 : -1].astype(np.uint8)


def test_routers_choose_the_recorded_experts_in_their_order(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="no engine is installed here")
    ids = recorded_ids(tokens=600, layers=5, chosen=6)
    make_recorded_model(tmp_path, ids, SPEC)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chosen: dict[int, torch.Tensor] = {}
    for layer, decoder in enumerate(model.model.layers):

        def keep(gate: Any, inputs: Any, layer: int = layer) -> None:
            logits = torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight)
            chosen[layer] = logits.topk(6, dim=-1).indices

        decoder.mlp.gate.register_forward_pre_hook(keep)
    order = np.random.default_rng(1).permutation(len(ids))
    with torch.inference_mode():
        model(torch.tensor([tokenizer(recorded_text(order)).input_ids]))
    found = np.stack([chosen[layer].numpy() for layer in range(5)], axis=1)
    np.testing.assert_array_equal(found, ids[order])
