"""Make a small MoE checkpoint whose gate sends a chosen share of the tokens to each rank.

``make_model(path, spec)`` writes what Hugging Face, vLLM and SGLang load offline: configuration,
weights, generation settings and a word-level tokenizer. Weights are random; one forward pass over
calibration text sets each gate just before it runs, so that every layer is tuned on the input that
it gets from the layers below, and at last the output head. Needs transformers, tokenizers and
safetensors when called.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ultraep_lab.demo.gates import calibrate_gate, domain_means, one_thread
from ultraep_lab.demo.spec import ModelSpec
from ultraep_lab.demo.text import (
    DOMAINS,
    SPECIAL_TOKENS,
    WORDS_PER_DOMAIN,
    WORDS_SHARED,
    calibration_words,
    save_tokenizer,
    vocabulary,
)

_SLOW = 2.5
SMALL_HIDDEN_SIZE = 256  # models up to this size gain little from a second thread

CONTEXT, STORED = 32768, torch.bfloat16  # tokens; type of the weights
CALIBRATION_LENGTH = 512  # tokens of a text; a longer one is slower and more exact
CALIBRATION_TEXTS = 24  # per domain; many, because what a text has in common is noise too
DOMAIN_WEIGHT = 0.6  # of a word's embedding that all words of its domain have in common
GAINS = {"o_proj": 1.5, "down_proj": 1.7}  # makes a block's output about as large as its input
ATTENTION_SHARPNESS = 1.5  # query scale: a token attends to few others, so its successors vary
LOGIT_STD = 4.0  # standard deviation of the logits over the vocabulary
DOMAIN_LOGIT = 6.0  # added to the words of the text's own domain: generated text keeps to it
SPECIAL_LOGIT = -40.0  # special tokens are never generated: generation ends at its maximum length


def served_type() -> str:
    """What this CPU serves quickly: bfloat16, unless it emulates that.

    Products of matrices are timed in both types. Where bfloat16 takes more than _SLOW times as long
    as float32, as on CPUs that have AVX2 alone, float32 is served instead.
    """
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(256, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            left @ right
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    is_slow = seconds[torch.bfloat16] > _SLOW * seconds[torch.float32]
    return "float32" if is_slow else "bfloat16"


def make_model(path: Path, spec: ModelSpec) -> Path:
    """Write a checkpoint to the directory ``path``, and return that.

    The demo's takes 20 seconds on two free cores.
    """
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, vocabulary(), CONTEXT)
    with one_thread(spec.hidden_size <= SMALL_HIDDEN_SIZE):
        model = _calibrated_model(_build_config(spec), spec)
    model.to(STORED).save_pretrained(path)
    return path


def _build_config(spec: ModelSpec) -> Any:
    """The transformers configuration of a spec."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=len(vocabulary()),
        hidden_size=spec.hidden_size,
        intermediate_size=2 * spec.moe_intermediate_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        num_experts=spec.num_experts,
        num_experts_per_tok=spec.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def _calibrated_model(config: Any, spec: ModelSpec) -> Any:
    """A float32 model whose weights are exact in bfloat16, gates and head calibrated."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():  # the library's own initialisation draws from the global one
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.inference_mode():
        _draw_weights(model, spec, generator)
        _calibrate(model, spec, generator)
    return model.eval()


def _draw_weights(model: Any, spec: ModelSpec, generator: torch.Generator) -> None:
    """Matrices are normal with variance gain**2 / fan-in; gates and head are left for later."""
    for name, weight in model.named_parameters():
        parts = name.split(".")
        if "embed_tokens" in parts:
            _store(weight, _embeddings(spec, generator))
        elif weight.ndim == 1:
            weight.fill_(ATTENTION_SHARPNESS if "q_norm" in parts else 1.0)
        elif "gate" not in parts and "lm_head" not in parts:
            gain = max((GAINS[part] for part in parts if part in GAINS), default=1.0)
            random = torch.randn(weight.shape, generator=generator)
            _store(weight, random * gain / weight.shape[-1] ** 0.5)


def _embeddings(spec: ModelSpec, generator: torch.Generator) -> Tensor:
    """Rows (V, H), unit mean square for a domain's words: its direction plus the word's noise."""
    size = spec.hidden_size
    directions = torch.linalg.qr(torch.randn(size, len(DOMAINS), generator=generator)).Q
    noise = torch.randn(len(vocabulary()), size, generator=generator)
    noise *= (1 - DOMAIN_WEIGHT**2) ** 0.5
    first = len(SPECIAL_TOKENS) + WORDS_SHARED
    for domain in range(len(DOMAINS)):
        words = slice(first + domain * WORDS_PER_DOMAIN, first + (domain + 1) * WORDS_PER_DOMAIN)
        noise[words] += DOMAIN_WEIGHT * size**0.5 * directions[:, domain]
    return noise


def _calibrate(model: Any, spec: ModelSpec, generator: torch.Generator) -> None:
    """Run calibration text once; hooks set queries, gates and at last the head from what they get.

    Queries lose what a domain's tokens have in common: otherwise all tokens of a text would attend
    to the same few others, and each text would be routed in its own way.
    """
    ids, token_domain = _calibration_batch()

    def on_query(projection: Any, args: tuple[Tensor]) -> None:
        basis = _mean_basis(args[0].reshape(-1, spec.hidden_size), token_domain)
        rows: Tensor = projection.weight
        _store(rows, rows - (rows @ basis) @ basis.T)

    def on_gate(layer: int) -> Callable[[Any, tuple[Tensor]], None]:
        def calibrate(gate: Any, args: tuple[Tensor]) -> None:
            hidden = args[0].reshape(-1, spec.hidden_size)
            rows = calibrate_gate(hidden, token_domain, layer, spec, generator)
            _store(gate.weight, rows)

        return calibrate

    with ExitStack() as hooks:
        for layer, decoder in enumerate(model.model.layers):
            query, gate = decoder.self_attn.q_proj, decoder.mlp.gate
            hooks.callback(query.register_forward_pre_hook(on_query).remove)
            hooks.callback(gate.register_forward_pre_hook(on_gate(layer)).remove)
        hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
    _store(model.lm_head.weight, _head_rows(hidden, token_domain, spec, generator))


def _calibration_batch() -> tuple[Tensor, Tensor]:
    """Token ids (N, T) and the domain index of every token, flattened (N * T,)."""
    ids_of = {word: index for index, word in enumerate(vocabulary())}
    texts = [
        [ids_of[word] for word in calibration_words(domain, CALIBRATION_LENGTH, text)]
        for domain in DOMAINS
        for text in range(CALIBRATION_TEXTS)
    ]
    per_domain = CALIBRATION_TEXTS * CALIBRATION_LENGTH
    return torch.tensor(texts), torch.arange(len(DOMAINS)).repeat_interleave(per_domain)


def _head_rows(
    hidden: Tensor, token_domain: Tensor, spec: ModelSpec, generator: torch.Generator
) -> Tensor:
    """Output rows (V, H): random where domains do not matter, plus a lift for the domain's words.

    Without taking the domain means out, every text of a domain would favour the same few words.
    """
    domains = len(DOMAINS)
    means = domain_means(hidden, token_domain)
    basis = _mean_basis(hidden, token_domain)
    rows = torch.randn(len(vocabulary()), spec.hidden_size, generator=generator)
    rows -= (rows @ basis) @ basis.T
    rows *= LOGIT_STD / (hidden @ rows.T).std()
    lift = torch.zeros(len(rows), domains)  # logit that the mean hidden state of a domain adds
    first = len(SPECIAL_TOKENS) + WORDS_SHARED
    for domain in range(domains):
        start = first + domain * WORDS_PER_DOMAIN
        lift[start : start + WORDS_PER_DOMAIN, domain] = DOMAIN_LOGIT
    lift[: len(SPECIAL_TOKENS)] = SPECIAL_LOGIT
    rows += lift @ torch.linalg.pinv(means).T
    return rows


def _mean_basis(hidden: Tensor, token_domain: Tensor) -> Tensor:
    """Orthonormal basis (H, D) of the domain means."""
    basis: Tensor = torch.linalg.qr(domain_means(hidden, token_domain).T).Q
    return basis


def _store(weight: Tensor, values: Tensor) -> None:
    """Copy ``values`` rounded to the stored type, so that calibration sees what will be served."""
    weight.copy_(values.to(STORED))
