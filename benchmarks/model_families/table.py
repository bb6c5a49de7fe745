"""The model families that people serve, and the configuration of a tiny model of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ultraep_lab.demo.text import vocabulary

CONTEXT = 4096  # tokens
# CPU kernels need sizes that are multiples of 32.
COMMON: Mapping[str, Any] = {
    "vocab_size": len(vocabulary()),
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


class Counts(NamedTuple):
    """Of a model's experts."""

    experts: int  # of a layer
    per_token: int
    layers: int  # with experts, of the target model, without draft layers


@dataclass(frozen=True)
class Family:
    """How one family's checkpoint is made, and what it needs."""

    model_type: str  # of transformers
    counts: Counts
    names: tuple[str, ...] = ("num_experts", "num_experts_per_tok")  # of the first two counts
    config: Mapping[str, Any] = field(default_factory=dict)  # beside ``COMMON`` and counts
    dtype: str = "float32"  # what it is stored and served in: bfloat16 where engines demand it
    sglang_dtype: str = ""  # what SGLang alone demands
    published: Mapping[str, Any] = field(default_factory=dict)  # config.json where it differs
    renamed: Mapping[str, str] = field(default_factory=dict)  # starts of weights' names, likewise
    draft: str = ""  # where published checkpoints keep a draft layer: "model.layers", "mtp.layers"
    num_zero_experts: int = 0  # experts without weights, numbered behind the others
    wrapper: Mapping[str, Any] | None = None  # of a multimodal model, around the text config
    preprocessor: Mapping[str, Any] | None = None  # preprocessor_config.json
    flags: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's engine
    sglang_flags: Mapping[str, Any] = field(default_factory=dict)  # of SGLang's

    def dtype_on(self, engine: str) -> str:
        """What ``engine`` serves it in."""
        return (self.sglang_dtype if engine == "sglang" else "") or self.dtype

    @property
    def num_hot(self) -> int:
        """Experts of a layer that the router prefers, and the replica slots that they need."""
        return max(2, 3 * self.counts.per_token // 8)


_LOCAL = ("num_local_experts", "num_experts_per_tok")
_ROUTED = ("n_routed_experts", "num_experts_per_tok")
_INNER: Mapping[str, Any] = {"moe_intermediate_size": 64}
_DENSE_FIRST: Mapping[str, Any] = {**_INNER, "first_k_dense_replace": 1, "n_shared_experts": 1}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # with 64 for the position, the one size that vLLM's CPU kernel has
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
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
    **_DENSE_FIRST,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": _YARN,
}
_DEEPSEEK_V2_FIELDS: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
}
_DEEPSEEK_V3_FIELDS: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_NO_DRAFT: Mapping[str, Any] = {"num_nextn_predict_layers": 0}
_HYBRID: Mapping[str, Any] = {
    **_INNER,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # what vLLM's CPU kernel has
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 64,
}
_QWEN_VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}
_QWEN_PREPROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
_KIMI_VISION: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}
_KIMI_PREPROCESSOR: Mapping[str, Any] = {
    "media_proc_cfg": {
        "patch_size": 14,
        "merge_kernel_size": 2,
        "temporal_merge_kernel_size": 4,
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "patch_limit_on_one_side": 512,
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
}
_TEXT_ONLY: Mapping[str, Any] = {"language_model_only": True}

FAMILIES: Mapping[str, Family] = {
    "Mixtral": Family("mixtral", Counts(8, 2, 3), _LOCAL),
    "Qwen2-MoE": Family(
        "qwen2_moe",
        Counts(8, 2, 3),
        config={**_INNER, "shared_expert_intermediate_size": 64},
        sglang_flags={"model_impl": "transformers"},  # its own model needs Triton
    ),
    "Qwen3-MoE": Family("qwen3_moe", Counts(8, 2, 3), config=_INNER),
    "Qwen3-Next": Family(
        "qwen3_next",
        Counts(8, 2, 4),
        config=_HYBRID,
        dtype="bfloat16",
        published={"full_attention_interval": 2},
        draft="mtp.layers",
    ),
    "Qwen3.5-MoE": Family(
        "qwen3_5_moe",
        Counts(8, 2, 4),
        config=_HYBRID,
        dtype="bfloat16",
        draft="mtp.layers",
        wrapper={"vision_config": _QWEN_VISION},
        preprocessor=_QWEN_PREPROCESSOR,
        flags=_TEXT_ONLY,
    ),
    "OLMoE": Family("olmoe", Counts(8, 2, 3)),
    "FlexOlmo": Family("flex_olmo", Counts(8, 2, 3)),
    "DeepSeek-V2": Family(
        "deepseek_v2",
        Counts(8, 2, 2),
        _ROUTED,
        _DEEPSEEK,
        published=_DEEPSEEK_V2_FIELDS,
    ),
    "DeepSeek-V3": Family(
        "deepseek_v3",
        Counts(16, 4, 2),
        _ROUTED,
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2},
        published=_DEEPSEEK_V3_FIELDS,
        draft="model.layers",
    ),
    "Kimi-K2": Family(
        "deepseek_v3",
        Counts(48, 8, 2),
        _ROUTED,
        {**_DEEPSEEK, **_NO_DRAFT},
        published=_DEEPSEEK_V3_FIELDS,
    ),
    "Kimi-K2.5": Family(
        "kimi_k25",
        Counts(16, 4, 2),
        _ROUTED,
        {**_DEEPSEEK, **_DEEPSEEK_V3_FIELDS, **_NO_DRAFT},
        published={"architectures": ["KimiK25ForConditionalGeneration"]},
        renamed={
            "language_model.model.blocks.": "language_model.model.layers.",
            "model.mm_projector.": "mm_projector.",
        },
        wrapper={"vision_config": _KIMI_VISION, "projection_hidden_size": 64},
        preprocessor=_KIMI_PREPROCESSOR,
        flags=_TEXT_ONLY,
    ),
    "Kimi-K3 counts": Family(
        "deepseek_v3",
        Counts(896, 16, 2),
        _ROUTED,
        {**_DEEPSEEK, **_NO_DRAFT, "moe_intermediate_size": 32},
        published=_DEEPSEEK_V3_FIELDS,
    ),
    "GLM-4-MoE": Family(
        "glm4_moe",
        Counts(16, 4, 2),
        _ROUTED,
        {**_DENSE_FIRST, "use_qk_norm": True},
        draft="model.layers",
    ),
    "Granite-MoE": Family("granitemoe", Counts(8, 2, 3), _LOCAL),
    "Granite-MoE-Shared": Family(
        "granitemoeshared",
        Counts(8, 2, 3),
        _LOCAL,
        {"shared_intermediate_size": 64},
    ),
    "Granite-MoE-Hybrid": Family(
        "granitemoehybrid",
        Counts(8, 2, 4),
        _LOCAL,
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
        },
    ),
    "Ernie-4.5-MoE": Family(
        "ernie4_5_moe",
        Counts(8, 2, 2),
        ("moe_num_experts", "moe_k"),
        {
            **_INNER,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "Hunyuan-MoE": Family(
        "hunyuan_v1_moe",
        Counts(8, 2, 3),
        ("num_experts", "moe_topk"),
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
        Counts(8, 2, 2),
        config={**_INNER, "first_k_dense_replace": 1},
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
        Counts(8, 2, 3),
        _LOCAL,
        {"sliding_window": 128},
    ),
    "Llama-4": Family(
        "llama4_text",
        Counts(8, 1, 3),
        _LOCAL,
        {"intermediate_size_mlp": 128},
        sglang_dtype="bfloat16",
    ),
    "dots1": Family(
        "dots1",
        Counts(8, 2, 2),
        _ROUTED,
        _DENSE_FIRST,
    ),
    "Phi-MoE": Family(
        "phimoe",
        Counts(8, 2, 3),
        _LOCAL,
        {"attention_bias": True, "lm_head_bias": True},
        published={"architectures": ["PhiMoEForCausalLM"]},
    ),
    "Phi-MoE of transformers": Family(
        "phimoe",
        Counts(8, 2, 3),
        _LOCAL,
    ),
    "DBRX": Family(
        "dbrx",
        Counts(8, 2, 3),
        (),
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
        published={
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "Solar-Open": Family(
        "solar_open",
        Counts(8, 2, 3),
        _ROUTED,
        {**_INNER, "n_shared_experts": 1},
    ),
    "Jamba": Family(
        "jamba",
        Counts(8, 2, 2),
        config={
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_dt_rank": 8,
        },
    ),
    "LFM2-MoE": Family(
        "lfm2_moe",
        Counts(8, 2, 2),
        config={
            **_INNER,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "MiniMax-M2": Family(
        "minimax_m2",
        Counts(8, 2, 3),
        _LOCAL,
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        published={
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
        },
    ),
    "LongCat-Flash": Family(
        "longcat_flash",
        Counts(8, 4, 2),
        ("n_routed_experts", "moe_topk"),
        {
            **_MLA,
            "num_hidden_layers": 4,  # two for each layer with experts
            "zero_expert_num": 4,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 64,
            "routed_scaling_factor": 1.0,
        },
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
        Counts(8, 2, 2),
        _ROUTED,
        {
            **_INNER,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
        },
        published={"layers_block_type": None, "hybrid_override_pattern": "ME*E"},
    ),
    "Qwen3-VL-MoE": Family(
        "qwen3_vl_moe",
        Counts(8, 2, 3),
        _LOCAL,
        _INNER,
        wrapper={"vision_config": _QWEN_VISION},
        preprocessor=_QWEN_PREPROCESSOR,
        flags=_TEXT_ONLY,
    ),
}
