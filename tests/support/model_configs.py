"""Configurations of models as their authors publish them, as far as sizes go."""

QWEN3_30B = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 3, "intermediate_size": 18432,
}  # fmt: skip
