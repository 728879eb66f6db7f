"""List facts of public models: their config.json and their published sizes."""

from __future__ import annotations

from typing import Any

# Parameters, those that one token passes through (gpt-oss's publisher leaves the embeddings out), bytes of bfloat16 KV
# cache per token, config.json.
KNOWN: dict[str, tuple[float, float, int, dict[str, Any]]] = {
    "Llama-3.1-8B": (8.03e9, 8.03e9, 131072, {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072,
    }),
    "Qwen3-0.6B": (0.596e9, 0.596e9, 114688, {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
    }),
    "Qwen3-8B": (8.19e9, 8.19e9, 147456, {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False, "attention_bias": False,
    }),
    "Qwen3-30B-A3B": (30.5e9, 3.35e9, 98304, {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False, "sliding_window": None,
    }),
    "Mixtral-8x7B": (46.7e9, 12.9e9, 131072, {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False,
    }),
    # The published config.json leaves most fields of the text part out; its vision tower has 0.42 billion more.
    "Gemma-3-27B": (27.0e9, 27.0e9, 507904, {"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024,
    }}),
    "DeepSeek-V3": (671e9, 37.5e9, 70272, {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "vocab_size": 129280, "tie_word_embeddings": False, "moe_layer_freq": 1,
    }),
    "GPT-OSS-20B": (20.9e9, 3.61e9 + 201088 * 2880, 49152, {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "attention_bias": True,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
