"""Tiny random checkpoints with settings that the oracle fixtures do not have.

`CASES` maps a name to (config, dtype, shards); `write_case` writes one. Shapes and names follow
the releases of each family.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_checkpoint import write_checkpoint

Shapes = dict[str, tuple[int, ...]]

_BASE = {
    "hidden_act": "silu", "hidden_size": 44, "max_position_embeddings": 4096,
    "num_attention_heads": 6, "num_hidden_layers": 3, "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 61,
}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
_BRANCHES = {
    "attention_bias": False, "head_dim": 12, "hc_count": 2, "hc_lowrank": 5, "hidden_act": "silu",
    "hidden_size": 20, "indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_head_dim": 8,
    "indexer_kv_heads": 1, "indexer_n_heads": 3, "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 10, "make_ngram_vocab_size_divisible_by": 4,
    "max_position_embeddings": 512, "model_type": "qwen4_exp_text", "moe_intermediate_size": 14,
    "num_attention_heads": 4, "num_experts": 6, "num_experts_per_tok": 6, "num_hidden_layers": 4,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 9,
    "tie_word_embeddings": False, "vocab_size": 53, "eos_token_id": 7, "split_ngram_parts": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip

CASES: dict[str, tuple[dict, str, int]] = {
    "qwen3_moe_dense_layers": (
        {**_BASE, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 10, "attention_bias": True,
         "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 5,
         "intermediate_size": 27, "moe_intermediate_size": 23, "norm_topk_prob": False,
         "tie_word_embeddings": True}, "F16", 3),
    "qwen3_moe_yarn_attention_factor": (
        {**_BASE, **_EXPERTS, "model_type": "qwen3_moe", "head_dim": 14, "num_experts_per_tok": 5,
         "moe_intermediate_size": 9, "norm_topk_prob": True, "intermediate_size": 1,
         "rope_scaling": {"rope_type": "yarn", "factor": 6.0, "attention_factor": 0.75,
                          "beta_fast": 4.0, "original_max_position_embeddings": 24}}, "F32", 1),
    "olmoe_grouped_heads": (
        {**_BASE, **_EXPERTS, "model_type": "olmoe", "hidden_size": 48, "clip_qkv": None,
         "intermediate_size": 19, "norm_topk_prob": True}, "BF16", 2),
    "mixtral_window": (
        {**_BASE, "model_type": "mixtral", "hidden_size": 48, "intermediate_size": 21,
         "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 5}, "BF16", 1),
    "granitemoe": (
        {**_BASE, "model_type": "granitemoe", "hidden_size": 48, "intermediate_size": 17,
         "num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.21,
         "embedding_multiplier": 11.5, "residual_multiplier": 0.22, "logits_scaling": 6.0,
         "tie_word_embeddings": True}, "BF16", 1),
    "minimax_m2": (
        {**_BASE, "model_type": "minimax_m2", "head_dim": 14, "rotary_dim": 6,
         "intermediate_size": 15, "num_local_experts": 7, "num_experts_per_tok": 3,
         "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
         "use_routing_bias": True, "attn_type_list": [1, 1, 1]}, "BF16", 2),
    "glm4_moe_groups": (
        {**_BASE, "model_type": "glm4_moe", "head_dim": 12, "partial_rotary_factor": 0.5,
         "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2,
         "intermediate_size": 33, "moe_intermediate_size": 11, "n_group": 4, "topk_group": 2,
         "n_routed_experts": 12, "n_shared_experts": 2, "num_experts_per_tok": 3,
         "norm_topk_prob": False, "routed_scaling_factor": 1.7}, "BF16", 1),
    "qwen4_exp_two_sites": (
        {**_BRANCHES, "ple_layer_ids": [1, 3], "ngram_size": 2, "heads_per_ngram": 3,
         "ngram_vocab_size_base": 11, "ple_embed_dim": 15, "ple_conv_kernel_size": 2,
         "output_gate_type": "sigmoid"}, "F32", 2),
    "qwen4_exp_long_grams": (
        {**_BRANCHES, "ple_layer_ids": [4], "ngram_size": 4, "heads_per_ngram": 2,
         "ngram_vocab_size_base": 30, "ple_embed_dim": 24, "hc_count": 3, "indexer_budget": 6,
         "indexer_compress_ratio": 3, "eos_token_id": [9, 3], "num_experts_per_tok": 2}, "BF16", 1),
    "qwen4_exp_dense_attention": (
        {**{k: v for k, v in _BRANCHES.items() if not k.startswith("indexer_")},
         "ple_layer_ids": [], "output_gate_type": "silu", "tie_word_embeddings": True}, "BF16", 1),
    "qwen4_exp_one_tap": (
        {**_BRANCHES, "ple_layer_ids": [2], "ngram_size": 3, "heads_per_ngram": 1,
         "ngram_vocab_size_base": 5, "ple_embed_dim": 14, "ple_conv_kernel_size": 1,
         "norm_topk_prob": False, "num_experts_per_tok": 1, "split_ngram_parts": 1}, "BF16", 1),
}  # fmt: skip


def _attention(c: dict, p: str, gated: bool = False) -> Shapes:
    h, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or h // heads
    out = {f"{p}q_proj.weight": (heads * d * (1 + gated), h), f"{p}o_proj.weight": (h, heads * d)}
    out |= {f"{p}{n}_proj.weight": (kv * d, h) for n in "kv"}
    kind = c["model_type"]
    if kind in ("olmoe", "minimax_m2"):
        out |= {f"{p}q_norm.weight": (heads * d,), f"{p}k_norm.weight": (kv * d,)}
    elif kind in ("qwen3_moe", "qwen4_exp_text") or c.get("use_qk_norm"):
        out |= {f"{p}{n}_norm.weight": (d,) for n in "qk"}
    if c.get("attention_bias"):
        names = "qkvo" if kind == "qwen3_moe" else "qkv"
        out |= {f"{p}{n}_proj.bias": out[f"{p}{n}_proj.weight"][:1] for n in names}
    return out


def _glu(p: str, h: int, inner: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = (f"{p}{n}.weight" for n in names)
    return {gate: (inner, h), up: (inner, h), down: (h, inner)}


_GLU, _W = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def _plain_ffn(c: dict, layer: int, p: str) -> Shapes:
    h, kind = c["hidden_size"], c["model_type"]
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    if kind == "glm4_moe":
        if layer < c["first_k_dense_replace"]:
            return _glu(f"{p}mlp.", h, c["intermediate_size"], _GLU)
        e = c["n_routed_experts"]
        out = {f"{p}mlp.gate.weight": (e, h), f"{p}mlp.gate.e_score_correction_bias": (e,)}
        out |= _glu(f"{p}mlp.shared_experts.", h, inner * c["n_shared_experts"], _GLU)
    elif kind in ("qwen3_moe", "olmoe"):
        dense = layer in c.get("mlp_only_layers", []) or (layer + 1) % c.get("decoder_sparse_step", 1)
        if dense:
            return _glu(f"{p}mlp.", h, c["intermediate_size"], _GLU)
        e = c["num_experts"]
        out = {f"{p}mlp.gate.weight": (e, h)}
    else:
        e, p = c["num_local_experts"], f"{p}block_sparse_moe."
        if kind == "granitemoe":
            return {f"{p}router.layer.weight": (e, h), f"{p}input_linear.weight": (e, 2 * inner, h),
                    f"{p}output_linear.weight": (e, h, inner)}  # fmt: skip
        out = {f"{p}gate.weight": (e, h)}
        if kind == "minimax_m2":
            out[f"{p}e_score_correction_bias"] = (e,)
        for expert in range(e):
            out |= _glu(f"{p}experts.{expert}.", h, inner, _W)
        return out
    for expert in range(e):
        out |= _glu(f"{p}mlp.experts.{expert}.", h, inner, _GLU)
    return out


def _branch_site(p: str, count: int, low: int, h: int, inject: bool) -> Shapes:
    wide = count * h
    out = {f"{p}hc_norm.weight": (wide,), f"{p}input_mix_weight_down.weight": (low, wide),
           f"{p}input_mix_weight_up.weight": (wide, low)}  # fmt: skip
    return out | ({f"{p}block_inject_weight.weight": (count, wide)} if inject else {})


def primes(base: int, skip: int, count: int) -> list[int]:
    """`count` primes from `base` on, after the first `skip`."""
    found, n = [], base
    while len(found) < skip + count:
        if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)):
            found.append(n)
        n += 1
    return found[skip:]


def _ngram(c: dict, site: int, p: str) -> tuple[Shapes, dict[str, np.ndarray]]:
    h, wide = c["hidden_size"], c["hidden_size"] * c["hc_count"]
    order, heads = c["ngram_size"], c["heads_per_ngram"]
    tables = (order - 1) * heads
    sizes = primes(c["ngram_vocab_size_base"], site * tables, tables)
    unit = c["make_ngram_vocab_size_divisible_by"]
    rows, parts = -(-sum(sizes) // unit) * unit, c["split_ngram_parts"]
    embed = c["ple_embed_dim"]
    shapes = {f"{p}key_proj.weight": (wide, embed), f"{p}value_proj.weight": (h, embed),
              f"{p}conv1d.weight": (wide, 1, c.get("ple_conv_kernel_size", 4))}  # fmt: skip
    shapes |= {f"{p}norm_{n}.weight": (wide,) for n in ("key", "query", "conv")}
    for part in range(parts):
        size = rows * (part + 1) // parts - rows * part // parts
        shapes[f"{p}ple_embedding.ngram_embedding.shard_{part}.weight"] = (size, embed // tables)
    numbers = {
        "layer_multipliers": [2 * (91237 * (site + 1) + 5077 * n) + 1 for n in range(order)],
        "ngram_heads_vocab_sizes": sizes,
        "ngram_heads_offsets": [sum(sizes[:i]) for i in range(tables)],
    }
    return shapes, {
        f"{p}ple_embedding.{name}": np.array(values, np.int64) for name, values in numbers.items()
    }


def _branch_layer(c: dict, layer: int, p: str) -> tuple[Shapes, dict[str, np.ndarray]]:
    h, e, i = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    s, numbers = c["shared_expert_intermediate_size"], {}
    out: Shapes = {}
    for site in ("attn", "mlp"):
        q = f"{p}{site}_hyper_connection."
        out |= _branch_site(q, c["hc_count"], c["hc_lowrank"], h, True)
    if layer + 1 in c["ple_layer_ids"]:
        shapes, numbers = _ngram(c, c["ple_layer_ids"].index(layer + 1), f"{p}ple.")
        out |= shapes
    if c["layer_types"][layer] == "full_attention":
        out |= _attention(c, f"{p}self_attn.", True)
        if "indexer_n_heads" in c:
            d, q = c["indexer_head_dim"], f"{p}self_attn.indexer."
            out[f"{q}index_qk_proj.weight"] = ((c["indexer_n_heads"] + 1) * d, h)
            out |= {f"{q}{n}_layernorm.weight": (d,) for n in "qk"}
    else:
        kd, vd, q = c["linear_key_head_dim"], c["linear_value_head_dim"], f"{p}linear_attn."
        vh = c["linear_num_value_heads"]
        channels = 2 * c["linear_num_key_heads"] * kd + vh * vd
        out |= {f"{q}A_log": (vh,), f"{q}dt_bias": (vh,), f"{q}norm.weight": (vd,),
                f"{q}conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]),
                f"{q}in_proj_qkv.weight": (channels, h), f"{q}in_proj_z.weight": (vh * vd, h),
                f"{q}in_proj_a.weight": (vh, h), f"{q}in_proj_b.weight": (vh, h),
                f"{q}out_proj.weight": (h, vh * vd)}  # fmt: skip
    out |= {f"{p}mlp.gate.weight": (e, h), f"{p}mlp.experts.gate_up_proj": (e, 2 * i, h),
            f"{p}mlp.experts.down_proj": (e, h, i), f"{p}mlp.shared_expert_gate.weight": (1, h)}
    return out | _glu(f"{p}mlp.shared_expert.", h, s, _GLU), numbers


def shapes_of(c: dict) -> tuple[Shapes, dict[str, np.ndarray]]:
    """(name -> shape of the float tensors, name -> the int64 ones)."""
    h, branches = c["hidden_size"], c["model_type"] == "qwen4_exp_text"
    out: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], h)}
    numbers: dict[str, np.ndarray] = {}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        if branches:
            shapes, more = _branch_layer(c, layer, p)
            out, numbers = out | shapes, numbers | more
            continue
        out |= {f"{p}{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        out |= _attention(c, f"{p}self_attn.") | _plain_ffn(c, layer, p)
    if branches:
        p = "model.hyper_connection_mixer."
        out |= _branch_site(p, c["hc_count"], c["hc_lowrank"], h, False)
    else:
        out["model.norm.weight"] = (h,)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (c["vocab_size"], h)
    return out, numbers


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...], centred: bool):
    """Matrices of unit gain; norm factors near 1 (stored as factor - 1 where `centred`)."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) > 1:
        return values * np.float32(1.4 / np.sqrt(shape[-1]))
    if name.endswith(("norm.weight", "norm_key.weight", "norm_query.weight", "norm_conv.weight")):
        plain = not centred or "linear_attn" in name
        return values * np.float32(0.1) + np.float32(plain)
    return values * np.float32(0.3)


def write_case(name: str, directory: Path, seed: int = 3) -> Path:
    config, dtype, shards = CASES[name]
    rng = np.random.default_rng(seed)
    shapes, numbers = shapes_of(config)
    centred = config["model_type"] == "qwen4_exp_text"
    weights = {n: random_tensor(rng, n, s, centred) for n, s in shapes.items()}
    dtypes = {n: "F32" for n in weights if n.endswith("e_score_correction_bias")}
    extra = {n: ("I64", v.shape, v.tobytes()) for n, v in numbers.items()}
    return write_checkpoint(
        directory, config, weights, dtype=dtype, dtypes=dtypes, extra=extra, shards=shards,
        generation={},
    )
