"""Configs of published geometries and of two that peers are measured on, as config.json has them.

Numbers are those of the published configs; keys that describe quantised weights or tokenizers are
left out. Each is a fresh dict.
"""

from __future__ import annotations

from collections.abc import Callable

Config = dict[str, object]


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B: 48 layers of 128 experts, top 8, inner 768."""
    return {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }


def qwen36_35b_a3b() -> Config:
    """Qwen3.6-35B-A3B: 30 gated delta and 10 attention layers, 256 experts, top 8."""
    return {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(40)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }


def _linear_attention(layers: int, heads: int) -> Config:
    """Every fourth layer and the last attend fully; the others keep a state."""
    full = sorted({*range(4, layers + 1, 4), layers})
    return {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        "head_dim": 128,
        "num_heads": heads,
        "short_conv_kernel_size": 4,
    }


def kimi_linear_48b() -> Config:
    """Kimi-Linear-48B-A3B: 20 KDA and 7 latent attention layers, 256 experts, top 8."""
    return {
        "model_type": "kimi_linear",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": _linear_attention(27, 32),
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


def k3_slice() -> Config:
    """Kimi K3: hidden 7168, 896 experts, top 16, in a latent of 3584; 93 layers when whole."""
    return {
        "model_type": "kimi_linear",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            **_linear_attention(93, 96),
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 96,
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


def deepseek_v2_lite() -> Config:
    """DeepSeek-V2-Lite: latent attention, 1 dense and 26 layers of 64 experts, top 6, 2 shared."""
    return {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    }


def moonlight() -> Config:
    """A Moonlight-like model: latent attention, 1 dense and 16 MoE layers, vocabulary 32 k."""
    return {
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "kv_lora_rank": 512,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 17,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 50000,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 32768,
    }


def resident() -> Config:
    """2.5 GB at 8 bits: 24 layers, hidden 1024, 64 experts, top 6, inner 512, vocabulary 16 k."""
    return {
        **qwen3_30b_a3b(),
        "hidden_size": 1024,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 512,
        "num_attention_heads": 8,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
    }


PRESETS: dict[str, Callable[[], Config]] = {
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3.6-35b-a3b": qwen36_35b_a3b,
    "kimi-linear-48b": kimi_linear_48b,
    "deepseek-v2-lite": deepseek_v2_lite,
    "k3-slice": k3_slice,
    "moonlight": moonlight,
    "resident-2.5gb": resident,
}


def cut(config: Config, layers: int) -> Config:
    """The first `layers` layers of a geometry (nested text configs too)."""
    out = {**config, "num_hidden_layers": layers}
    if isinstance(text := config.get("text_config"), dict):
        return {**config, "text_config": cut(text, layers)}
    if isinstance(kinds := config.get("layer_types"), list):
        out["layer_types"] = (kinds * -(-layers // max(1, len(kinds))))[:layers]
    if isinstance(lists := config.get("linear_attn_config"), dict):
        kept = {
            key: [i for i in value if i <= layers]
            for key, value in lists.items()
            if isinstance(value, list)
        }
        out["linear_attn_config"] = {**lists, **kept}
    return out
