"""Tiny checkpoints of the model families that people serve: random weights, real code paths.

``make_family(path, name)`` writes what transformers, vLLM and SGLang load offline, in seconds:
config.json, weights under the names of published checkpoints, and the demo's tokenizer. The router
prefers a few experts of one rank (of two), another rank in the next layer, so that there is
something to balance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.family_weights import draw_weights, publish
from ultraep_serve.demo.text import DOMAINS, save_tokenizer, vocabulary

__all__ = ["CONTEXT", "FAMILIES", "Family", "make_family"]

CONTEXT = 4096  # tokens
# CPU kernels need sizes that are multiples of 32.
_COMMON: Mapping[str, Any] = {
    "vocab_size": len(vocabulary(DOMAINS)),
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": CONTEXT // 2,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_DEEPSEEK: Mapping[str, Any] = {
    **_MLA,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": _YARN,
}
_DEEPSEEK_V3_FIELDS: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_HYBRID: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "moe_intermediate_size": 64,
}
_VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """How one family's checkpoint is made, and what it needs."""

    model_type: str  # of transformers
    num_experts: int
    experts_per_token: int
    num_moe_layers: int  # of the target model, without draft layers
    config: Mapping[str, Any] = field(default_factory=dict)  # beside the common sizes
    special: str = ""  # what sets its experts apart
    dtype: str = "float32"  # what it is stored and served in: bfloat16 where engines demand it
    sglang_dtype: str = ""  # what SGLang alone demands
    published: Mapping[str, Any] = field(default_factory=dict)  # config.json where it differs
    renamed: Mapping[str, str] = field(default_factory=dict)  # starts of weights' names, likewise
    draft: str = ""  # where published checkpoints keep a draft layer, see ``publish``
    num_zero_experts: int = 0  # experts without weights, numbered behind the others
    wrapper: Mapping[str, Any] | None = None  # of a multimodal model, around the text config
    flags: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's engine

    def dtype_on(self, engine: str) -> str:
        """What ``engine`` serves it in."""
        return (self.sglang_dtype if engine == "sglang" else "") or self.dtype

    @property
    def num_hot(self) -> int:
        """Experts of a layer that the router prefers, and the replica slots that they need."""
        return max(2, self.experts_per_token // 4)


def _counts(experts: int, chosen: int, name: str = "num_experts") -> dict[str, int]:
    return {name: experts, "num_experts_per_tok": chosen}


FAMILIES: Mapping[str, Family] = {
    "Mixtral": Family("mixtral", 8, 2, 3, _counts(8, 2, "num_local_experts")),
    "Qwen2-MoE": Family(
        "qwen2_moe",
        8,
        2,
        3,
        {**_counts(8, 2), "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        special="gated shared expert",
    ),
    "Qwen3-MoE": Family("qwen3_moe", 8, 2, 3, {**_counts(8, 2), "moe_intermediate_size": 64}),
    "Qwen3-Next": Family(
        "qwen3_next",
        8,
        2,
        4,
        {**_counts(8, 2), **_HYBRID},
        special="linear attention in every other layer, gated shared expert, draft layer",
        dtype="bfloat16",
        draft="mtp.layers",
    ),
    "Qwen3.5-MoE": Family(
        "qwen3_5_moe",
        8,
        2,
        4,
        {**_counts(8, 2), **_HYBRID},
        special="linear attention in every other layer, multimodal wrapper, draft layer",
        dtype="bfloat16",
        draft="mtp.layers",
        wrapper={"vision_config": _VISION},
        flags={"language_model_only": True},
    ),
    "OLMoE": Family("olmoe", 8, 2, 3, _counts(8, 2)),
    "DeepSeek-V2": Family(
        "deepseek_v2",
        8,
        2,
        2,
        {**_counts(8, 2, "n_routed_experts"), **_DEEPSEEK},
        special="latent attention, shared expert, dense first layer",
        published={"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        16,
        4,
        2,
        {**_counts(16, 4, "n_routed_experts"), **_DEEPSEEK, "n_group": 4, "topk_group": 2},
        special="correction bias, groups, shared expert, draft layer",
        published=_DEEPSEEK_V3_FIELDS,
        draft="model.layers",
    ),
    "Kimi-K2": Family(
        "deepseek_v3",
        48,
        8,
        2,
        {**_counts(48, 8, "n_routed_experts"), **_DEEPSEEK, "num_nextn_predict_layers": 0},
        special="DeepSeek-V3's architecture, one group",
        published=_DEEPSEEK_V3_FIELDS,
    ),
    "Kimi-K3 counts": Family(
        "deepseek_v3",
        896,
        16,
        2,
        {
            **_counts(896, 16, "n_routed_experts"),
            **_DEEPSEEK,
            "moe_intermediate_size": 32,
            "num_nextn_predict_layers": 0,
        },
        special="DeepSeek-V3's architecture, 896 experts, 16 per token",
        published=_DEEPSEEK_V3_FIELDS,
    ),
    "GLM-4-MoE": Family(
        "glm4_moe",
        16,
        4,
        2,
        {
            **_counts(16, 4, "n_routed_experts"),
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "use_qk_norm": True,
        },
        special="correction bias, shared expert, draft layer",
        draft="model.layers",
    ),
    "Granite-MoE": Family("granitemoe", 8, 2, 3, _counts(8, 2, "num_local_experts")),
    "Ernie-4.5-MoE": Family(
        "ernie4_5_moe",
        8,
        2,
        2,
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 64,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
        special="correction bias, shared expert, dense first layer",
    ),
    "Hunyuan-MoE": Family(
        "hunyuan_v1_moe",
        8,
        2,
        3,
        {"num_experts": 8, "moe_topk": 2},
        special="shared expert",
        published={
            "use_mixed_mlp_moe": True,
            "num_shared_expert": [1] * 3,
            "moe_intermediate_size": [128] * 3,
            "attention_head_dim": 32,
            "use_qk_norm": True,
            "use_cla": False,
        },
    ),
    "Hy-V3": Family(
        "hy_v3",
        8,
        2,
        2,
        {**_counts(8, 2), "moe_intermediate_size": 64, "first_k_dense_replace": 1},
        special="correction bias, shared expert, dense first layer",
        published={
            "expert_hidden_dim": 64,
            "qk_norm": True,
            "route_norm": True,
            "moe_router_use_sigmoid": True,
            "moe_router_enable_expert_bias": True,
        },
    ),
    "gpt-oss": Family(
        "gpt_oss",
        8,
        2,
        3,
        {**_counts(8, 2, "num_local_experts"), "sliding_window": 128},
        special="expert biases, clamped SwiGLU, attention sinks",
    ),
    "Llama-4": Family(
        "llama4_text",
        8,
        1,
        3,
        {**_counts(8, 1, "num_local_experts"), "intermediate_size_mlp": 128},
        special="router weight on the input, shared expert, one expert per token",
        sglang_dtype="bfloat16",
    ),
    "dots1": Family(
        "dots1",
        8,
        2,
        2,
        {
            **_counts(8, 2, "n_routed_experts"),
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
        },
        special="vLLM's Transformers backend",
    ),
    "Phi-MoE": Family(
        "phimoe",
        8,
        2,
        3,
        {**_counts(8, 2, "num_local_experts"), "attention_bias": True, "lm_head_bias": True},
        special="sparse mixer routing",
        published={"architectures": ["PhiMoEForCausalLM"]},
    ),
    "Phi-MoE of transformers": Family(
        "phimoe",
        8,
        2,
        3,
        _counts(8, 2, "num_local_experts"),
        special="transformers' name of the architecture: vLLM's Transformers backend",
    ),
    "DBRX": Family(
        "dbrx",
        8,
        2,
        3,
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": CONTEXT,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {
                "hidden_size": 128,
                "ffn_hidden_size": 128,
                "moe_num_experts": 8,
                "moe_top_k": 2,
            },
        },
        special="an experts module of its own",
        published={
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "LFM2-MoE": Family(
        "lfm2_moe",
        8,
        2,
        2,
        {
            **_counts(8, 2),
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        special="short convolutions, correction bias, dense first layer",
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        8,
        2,
        3,
        _counts(8, 2, "num_local_experts"),
        special="correction bias",
        published={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True},
    ),
    "LongCat-Flash": Family(
        "longcat_flash",
        8,
        4,
        2,
        {
            **_MLA,
            "num_hidden_layers": 4,  # two for each layer with experts
            "n_routed_experts": 8,
            "moe_topk": 4,
            "zero_expert_num": 4,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 64,
            "routed_scaling_factor": 1.0,
        },
        special="zero experts: 4 of 12 that a token may choose have no weights",
        published={
            "rope_theta": 1e7,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
        num_zero_experts=4,
    ),
    "Nemotron-H": Family(
        "nemotron_h",
        8,
        2,
        2,
        {
            **_counts(8, 2, "n_routed_experts"),
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
        },
        published={"layers_block_type": None, "hybrid_override_pattern": "ME*E"},
        special="latent experts: they work on a projection of the input; relu squared, no gate",
    ),
    "Kimi-K2.5": Family(
        "kimi_k25",
        16,
        4,
        2,
        {**_counts(16, 4, "n_routed_experts"), **_DEEPSEEK, "num_nextn_predict_layers": 0},
        special="DeepSeek-V3's architecture in a multimodal wrapper, served with text",
        published={"architectures": ["KimiK25ForConditionalGeneration"]},
        renamed={
            "language_model.model.blocks.": "language_model.model.layers.",
            "model.mm_projector.": "mm_projector.",
        },
        wrapper={
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_attention_heads": 2,
            },
            "projection_hidden_size": 64,
        },
        flags={"language_model_only": True},
    ),
    "Qwen3-VL-MoE": Family(
        "qwen3_vl_moe",
        8,
        2,
        3,
        {**_counts(8, 2, "num_local_experts"), "moe_intermediate_size": 64},
        special="multimodal wrapper, served with text",
        wrapper={"vision_config": _VISION},
        flags={"language_model_only": True},
    ),
}


def make_family(path: Path, name: str, seed: int = 0) -> Path:
    """Write the checkpoint of ``FAMILIES[name]`` to the directory ``path``, and return that."""
    family = FAMILIES[name]
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, DOMAINS, CONTEXT)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _build(family)
        with torch.no_grad():
            routers = draw_weights(
                model, family.num_experts, family.num_zero_experts, family.num_hot
            )
        assert routers == family.num_moe_layers + bool(family.draft), f"{name}: {routers = }"
        model.save_pretrained(path)
        publish(path, family.num_experts, family.draft, family.published, family.renamed)
    return path


def _build(family: Family) -> Any:
    """The model of transformers, with a decoder layer more where there is a draft."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values, dtype = {**_COMMON, **family.config}, getattr(torch, family.dtype)
    if family.draft:
        values["num_hidden_layers"] += 1
        if "layer_types" in values:
            values["layer_types"] = [*values["layer_types"], "full_attention"]
    if family.wrapper is None:
        config = AutoConfig.for_model(family.model_type, **values)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    ids = {name: values[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    special = {f"{kind}_token_id": 3 for kind in ("image", "video", "vision_start", "vision_end")}
    config = AutoConfig.for_model(
        family.model_type, text_config=values, tie_word_embeddings=False, **family.wrapper,
        **ids, **special,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config, dtype=dtype)
