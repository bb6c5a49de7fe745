"""Made-up checkpoints: they load, skew as asked on text they never saw, and their text is exact."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.model_report import LayerReport, measure_model
from tests.support.tiny_models import tiny_glm4, tiny_qwen3
from ultraep_lab.demo.gates import hot_rank, target_shares
from ultraep_lab.demo.models import make_model
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import WORDS_PER_DOMAIN, calibration_words, sample_text, vocabulary
from ultraep_serve.errors import ConfigError

# Four ranks too: then the hot rank has few experts, and the cold ranks share what is left.
SKEWED = {
    "qwen3": tiny_qwen3(),
    "glm4": tiny_glm4(),
    "qwen3-4-ranks": replace(tiny_qwen3(imbalance=2.0, num_ranks=4), num_experts=16),
}
BALANCED = {"qwen3": tiny_qwen3(imbalance=1.0), "glm4": tiny_glm4(imbalance=1.0)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelSpec, Path]:
    pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    specs = [*SKEWED.values(), *BALANCED.values()]
    return {spec: make_model(tmp_path_factory.mktemp("model"), spec) for spec in specs}


@pytest.fixture(scope="module")
def measured(made: dict[ModelSpec, Path]) -> dict[ModelSpec, list[LayerReport]]:
    """On four texts of each domain, on one where every text must do."""
    skewed = {spec: measure_model(made[spec], spec, num_texts=4) for spec in SKEWED.values()}
    even = {spec: measure_model(made[spec], spec, num_texts=1) for spec in BALANCED.values()}
    return skewed | even


@pytest.mark.parametrize("spec", SKEWED.values(), ids=SKEWED.keys())
def test_stored_model_has_the_chosen_imbalance(
    measured: dict[ModelSpec, list[LayerReport]], spec: ModelSpec
) -> None:
    reports = measured[spec]
    assert {(report.layer, report.domain) for report in reports} == {
        (layer, domain) for layer in spec.moe_layers for domain in spec.domains
    }
    for report in reports:
        assert report.imbalance == pytest.approx(spec.imbalance, rel=0.05)
        # copies of the hot experts alone can bring the hot rank down to the mean
        assert report.movable >= report.excess


@pytest.mark.parametrize("spec", SKEWED.values(), ids=SKEWED.keys())
def test_another_domain_has_other_hot_experts(
    measured: dict[ModelSpec, list[LayerReport]], spec: ModelSpec
) -> None:
    for layer in spec.moe_layers:
        of_layer = [report for report in measured[spec] if report.layer == layer]
        assert [report.domain for report in of_layer] == list(spec.domains)
        hot = [expert for report in of_layer for expert in report.hot_experts]
        assert len(set(hot)) == len(hot)
        assert [report.hot_rank for report in of_layer] == [
            hot_rank(spec, layer, index) for index in range(len(spec.domains))
        ]


@pytest.mark.parametrize("spec", BALANCED.values(), ids=BALANCED.keys())
def test_balanced_model_is_balanced_in_every_batch(
    measured: dict[ModelSpec, list[LayerReport]], spec: ModelSpec
) -> None:
    assert max(report.imbalance for report in measured[spec]) <= 1.02


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_checkpoint_has_one_tensor_per_expert(made: dict[ModelSpec, Path], name: str) -> None:
    from safetensors import safe_open

    spec = SKEWED[name]
    with safe_open(made[spec] / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    inner, outer = spec.moe_intermediate_size, spec.hidden_size
    for layer in spec.moe_layers:
        mlp = f"model.layers.{layer}.mlp"
        assert shapes[f"{mlp}.gate.weight"] == (spec.num_experts, outer)
        for expert in range(spec.num_experts):
            assert shapes[f"{mlp}.experts.{expert}.gate_proj.weight"] == (inner, outer)
            assert shapes[f"{mlp}.experts.{expert}.up_proj.weight"] == (inner, outer)
            assert shapes[f"{mlp}.experts.{expert}.down_proj.weight"] == (outer, inner)
    assert ("model.layers.1.mlp.gate.e_score_correction_bias" in shapes) == (name == "glm4")


@pytest.mark.parametrize("name", ["qwen3", "glm4"])
def test_greedy_text_is_varied_and_keeps_to_its_domain(
    made: dict[ModelSpec, Path], name: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, spec = made[SKEWED[name]], SKEWED[name]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for domain in spec.domains:
        prompt = torch.tensor([tokenizer.encode(sample_text(domain, 200, seed=3))])
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=48)
        words = tokenizer.decode(output[0, 200:]).split()
        assert len(words) == 48  # no end-of-text token cut it short
        assert len(set(words)) >= 24
        assert len(set(words) & set(calibration_words(domain, 20_000, 0))) >= 0.9 * len(set(words))


def test_same_seed_gives_same_bytes(tmp_path: Path, made: dict[ModelSpec, Path]) -> None:
    spec = SKEWED["qwen3"]
    make_model(tmp_path / "again", spec)
    make_model(tmp_path / "other", replace(spec, seed=1))
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (made[spec] / name).read_bytes()
    first = (made[spec] / "model.safetensors").read_bytes()
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != first


def test_tokenizer_counts_words_and_round_trips(made: dict[ModelSpec, Path]) -> None:
    from transformers import AutoTokenizer

    spec = SKEWED["glm4"]
    tokenizer = AutoTokenizer.from_pretrained(made[spec])
    for domain in spec.domains:
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


def test_texts_of_neighbouring_seeds_share_no_prefix() -> None:
    starts = {sample_text("law", 4, seed).split()[0] for seed in range(300, 300 + WORDS_PER_DOMAIN)}
    assert len(starts) == WORDS_PER_DOMAIN
    far = {tuple(sample_text("law", 2, seed).split()) for seed in range(0, 10_000, 97)}
    assert len(far) == len(range(0, 10_000, 97))
    assert sample_text("law", 64, 1) == sample_text("law", 64, 1)


def test_domains_have_their_own_words() -> None:
    words = vocabulary(("law", "code", "medicine"))
    assert len(set(words)) == len(words)
    with pytest.raises(ConfigError, match="rename"):
        vocabulary(("law", "law"))


@pytest.mark.parametrize("spec", SKEWED.values(), ids=SKEWED.keys())
def test_target_shares_add_up(spec: ModelSpec) -> None:
    shares = target_shares(spec, layer=1, domain=0)
    per_rank = shares.view(spec.num_ranks, -1).sum(1)
    assert float(shares.sum()) == pytest.approx(spec.experts_per_token, rel=1e-4)
    assert float(per_rank.max() / per_rank.mean()) == pytest.approx(spec.imbalance, rel=1e-4)
    assert float(shares.max()) <= 0.9201


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 15}, "divisible"),
        ({"imbalance": 1.99}, "must be"),
        ({"imbalance": 0.9}, "must be"),
        ({"hidden_size": 500}, "32"),
        ({"architecture": "glm4_moe", "num_groups": 16}, "group"),
        ({"architecture": "glm4_moe", "num_dense_layers": 4}, "below"),
        ({"domains": ()}, "domains"),
    ],
)
def test_impossible_specs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ModelSpec(), **change)  # type: ignore[arg-type]


def test_import_needs_no_model_library() -> None:
    code = (
        "import sys, ultraep_lab.demo; "
        "sys.exit(bool({'transformers', 'tokenizers', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
