"""Made-up checkpoints: they load, skew as asked on text they never saw, and their text is exact."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import tiny_qwen3
from ultraep_lab.demo.gates import NUM_HOT, hot_rank, one_thread
from ultraep_lab.demo.models import SMALL_HIDDEN_SIZE, make_model
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import DOMAINS, sample_text
from ultraep_lab.imbalance import imbalance

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

# Four ranks too: then the hot rank has few experts, and the cold ranks share what is left.
SKEWED = {
    "qwen3": tiny_qwen3(),
    "qwen3-4-ranks": replace(tiny_qwen3(imbalance=2.0, num_ranks=4), num_experts=16),
}
BALANCED = tiny_qwen3(imbalance=1.0)
TEXT_TOKENS, HELD_OUT_SEED = 2048, 100_000


def loads_of(path: Path, spec: ModelSpec, num_texts: int) -> dict[tuple[int, str], Any]:
    """Load (E,) of every MoE layer by ``num_texts`` held-out texts of every domain, in float32."""
    model, tokenizer = load(path)
    found = {}
    with one_thread(spec.hidden_size <= SMALL_HIDDEN_SIZE), torch.inference_mode():
        for domain in DOMAINS:
            seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + num_texts)
            texts = (sample_text(domain, TEXT_TOKENS, seed) for seed in seeds)
            ids = torch.tensor([tokenizer.encode(text) for text in texts])
            gates = {model.model.layers[layer].mlp.gate: layer for layer in range(spec.num_layers)}
            chosen: dict[int, Any] = {}
            keep = lambda gate, _, output, of=gates, to=chosen: to.update({of[gate]: output[2]})  # noqa: E731
            with ExitStack() as hooks:
                for gate in gates:
                    hooks.callback(gate.register_forward_hook(keep).remove)
                model.model(ids, use_cache=False)
            for layer, experts in chosen.items():
                counts = experts.flatten().bincount(minlength=spec.num_experts)
                found[layer, domain] = counts.numpy()
    return found


def load(path: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    return (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        transformers.AutoTokenizer.from_pretrained(path),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelSpec, Path]:
    specs = [*SKEWED.values(), BALANCED]
    return {spec: make_model(tmp_path_factory.mktemp("model"), spec) for spec in specs}


@pytest.mark.parametrize("spec", SKEWED.values(), ids=SKEWED.keys())
def test_stored_model_has_the_chosen_imbalance_and_other_hot_experts_in_each_domain(
    made: dict[ModelSpec, Path], spec: ModelSpec
) -> None:
    loads = loads_of(made[spec], spec, num_texts=4)
    assert loads.keys() == {(layer, name) for layer in range(spec.num_layers) for name in DOMAINS}
    hottest = set()
    for (layer, domain), load in loads.items():
        per_rank = load.reshape(spec.num_ranks, spec.experts_per_rank)
        rank_load = per_rank.sum(1)
        assert imbalance(rank_load) == pytest.approx(spec.imbalance, rel=0.05)
        hot = int(rank_load.argmax())
        assert hot == hot_rank(spec, layer, DOMAINS.index(domain))
        busiest = (-per_rank[hot]).argsort(kind="stable")[:NUM_HOT]
        # copies of the hot experts alone can bring the hot rank down to the mean
        assert per_rank[hot][busiest].sum() >= rank_load[hot] - rank_load.mean()
        hottest |= {(layer, hot, expert) for expert in busiest.tolist()}
    assert len(hottest) == NUM_HOT * len(loads)  # other ones in each domain


def test_balanced_model_is_balanced_in_every_batch(made: dict[ModelSpec, Path]) -> None:
    """On one text of each domain: every text must do."""
    for load in loads_of(made[BALANCED], BALANCED, num_texts=1).values():
        assert imbalance(load.reshape(BALANCED.num_ranks, -1).sum(1)) <= 1.02


def test_tokenizer_counts_words_and_round_trips(made: dict[ModelSpec, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(made[SKEWED["qwen3"]])
    for domain in DOMAINS:
        for num_tokens in (0, 1, 2, 1000):
            text = sample_text(domain, num_tokens, seed=5)
            ids = tokenizer.encode(text)
            assert len(ids) == num_tokens
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("nonsense") == [tokenizer.unk_token_id]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample_text("law", 50, 0)}], return_dict=False
    )
    assert len(chat) == 50
