"""The checkpoint that routes as recorded, by transformers in bfloat16; and benchmarks/routed.py."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ultraep_lab.demo.recorded import RecordedSpec, make_recorded_model, recorded_text
from ultraep_serve.errors import ConfigError

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


@pytest.mark.parametrize("wrong", [16, 3], ids=["no such expert", "an expert twice"])
def test_ids_that_no_router_can_choose_are_refused(tmp_path: Path, wrong: int) -> None:
    ids = recorded_ids(tokens=4, layers=1, chosen=3)
    ids[2, 0] = [3, wrong, 5]
    with pytest.raises(ConfigError, match="different experts"):
        make_recorded_model(tmp_path, ids, SPEC)


def test_a_critical_path_adds_up_what_ranks_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    routed = importlib.import_module("routed")
    events = np.zeros((1, 2, 2), routed.EVENT)  # a batch, two layers, two ranks
    events["count"] = [[[1, 2], [2, 1]]]
    events["plan"] = [[[10, 30], [30, 20]]]
    events["experts"] = [[[500, 400], [300, 600]]]
    events["others"] = [[[4, 5], [6, 7]]]
    events["second_sum"] = [[[50, 140], [390, 60]]]  # the first to arrive waits for the other
    events["exchanged"] = [[[1, 1], [0, 0]]]
    events["before"] = [[[7777, 7777], [100, 900]]]  # the span begins in the first layer
    events["first_sum"] = [[[7777, 7777], [820, 20]]]
    events["routing"] = [[[7777, 7777], [3, 8]]]
    events["begin"], events["end"] = [[[5, 3], [0, 0]]], [[[0, 0], [2003, 2000]]]
    events["away"] = [[[1, 2], [3, 0]]]
    found = routed.critical_path(events)
    moe = (2 + 30 + 504 + 50) + (8 + 1 + 20 + 607 + 60)  # in one stretch where nothing is exchanged
    assert found["moe"] == pytest.approx(moe / 1e6)
    assert found["path"] == pytest.approx((moe + 900 + 20) / 1e6)
    assert found["clock"] == pytest.approx(2000 / 1e6)
    assert found["away"] == pytest.approx(5 / 1e6)
