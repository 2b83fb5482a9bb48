"""Header-only checkpoints of large published models: real configs, names, shapes and dtypes.

The data are holes: terabytes are declared and megabytes written. For testing plans.
    python tests/sparse_models.py kimi_k3|deepseek_v3|kimi_linear DIRECTORY
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

DTYPE_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
Entry = tuple[str, str, tuple[int, ...], int]
"""(name, dtype, shape, shard from 1)."""


def _layers(full: list[int], count: int) -> dict[str, list[int]]:
    return {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, count + 1) if i not in full],
    }


def kimi_k3_config() -> dict[str, object]:
    text = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 12,
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            **_layers([*range(4, 93, 4), 93], 93),
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 1048576,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
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
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "pad_token_id": 163839,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": 32,
                        "num_bits": 4,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "scale_dtype": "torch.uint8",
                        "strategy": "group",
                        "symmetric": True,
                        "type": "float",
                        "zp_dtype": None,
                    },
                }
            },
            "format": "mxfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k3",
        "pad_token_id": 163839,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"patch_size": 14, "vt_hidden_size": 1024, "vt_num_hidden_layers": 27},
    }


def deepseek_v3_config() -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1",
        "use_cache": True,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }


def kimi_linear_config() -> dict[str, object]:
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": 163584,
        "dtype": "bfloat16",
        "eos_token_id": 163586,
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "initializer_range": 0.02,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            **_layers([4, 8, 12, 16, 20, 24, 27], 27),
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "model_type": "kimi_linear",
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
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "pad_token_id": 163839,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    }


def _glu(p: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{p}gate_proj.weight", (inner, hidden)
    yield f"{p}up_proj.weight", (inner, hidden)
    yield f"{p}down_proj.weight", (hidden, inner)


def _routed(c: dict, layer: int) -> bool:
    return layer >= c["first_k_dense_replace"] and layer % c["moe_layer_freq"] == 0


def kimi_text_tensors(c: dict, prefix: str, shard: Callable[[int], int]) -> Iterator[Entry]:
    """Kimi Linear, or K3 with its residuals, latent experts and MXFP4."""
    h, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    linear = c["linear_attn_config"]
    heads, dim, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    width = heads * dim
    residuals = c.get("attn_res_block_size") is not None
    packed = c.get("quantization_config") is not None
    ah, r, dn, dr, dv = (
        c[k]
        for k in (
            "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
            "v_head_dim",
        )
    )  # fmt: skip
    m = f"{prefix}model."
    outside = layers + 1
    yield f"{m}embed_tokens.weight", "BF16", (vocab, h), shard(layers)
    if not c["tie_word_embeddings"]:
        yield f"{prefix}lm_head.weight", "BF16", (vocab, h), shard(outside)
    yield f"{m}norm.weight", "BF16", (h,), shard(outside)
    if residuals:
        yield f"{m}output_attn_res_norm.weight", "BF16", (h,), shard(outside)
        yield f"{m}output_attn_res_proj.weight", "BF16", (1, h), shard(outside)
    for layer in range(layers):
        p, s = f"{m}layers.{layer}.", shard(layer)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{name}.weight", "BF16", (h,), s
        if residuals:
            for name in ("self_attention", "mlp"):
                yield f"{p}{name}_res_norm.weight", "BF16", (h,), s
                yield f"{p}{name}_res_proj.weight", "BF16", (1, h), s
        a = f"{p}self_attn."
        if layer + 1 in linear["kda_layers"]:
            for part in "qkv":
                yield f"{a}{part}_proj.weight", "BF16", (width, h), s
                yield f"{a}{part}_conv1d.weight", "F32", (width, 1, taps), s
            yield f"{a}f_a_proj.weight", "BF16", (dim, h), s
            yield f"{a}f_b_proj.weight", "BF16", (width, dim), s
            yield f"{a}b_proj.weight", "BF16", (heads, h), s
            yield f"{a}A_log", "F32", (128,) if residuals else (1, 1, heads, 1), s
            yield f"{a}dt_bias", "F32", (width,), s
            yield f"{a}o_norm.weight", "F32", (dim,), s
            yield f"{a}o_proj.weight", "BF16", (h, width), s
            if linear.get("use_full_rank_gate"):
                yield f"{a}g_proj.weight", "BF16", (width, h), s
            else:
                yield f"{a}g_a_proj.weight", "BF16", (dim, h), s
                yield f"{a}g_b_proj.weight", "BF16", (width, dim), s
        else:
            if c["q_lora_rank"]:
                q = c["q_lora_rank"]
                yield f"{a}q_a_proj.weight", "BF16", (q, h), s
                yield f"{a}q_a_layernorm.weight", "BF16", (q,), s
                yield f"{a}q_b_proj.weight", "BF16", (ah * (dn + dr), q), s
            else:
                yield f"{a}q_proj.weight", "BF16", (ah * (dn + dr), h), s
            yield f"{a}kv_a_proj_with_mqa.weight", "BF16", (r + dr, h), s
            yield f"{a}kv_a_layernorm.weight", "BF16", (r,), s
            yield f"{a}kv_b_proj.weight", "BF16", (ah * (dn + dv), r), s
            yield f"{a}o_proj.weight", "BF16", (h, ah * dv), s
            if c.get("mla_use_output_gate"):
                yield f"{a}g_proj.weight", "BF16", (ah * dv, h), s
        if not _routed(c, layer):
            for name, shape in _glu(f"{p}mlp.", h, c["intermediate_size"]):
                yield name, "BF16", shape, s
            continue
        b, inner, experts = f"{p}block_sparse_moe.", c["moe_intermediate_size"], c["num_experts"]
        latent = c.get("routed_expert_hidden_size")
        wide = latent or h
        yield f"{b}gate.weight", "BF16", (experts, h), s
        yield f"{b}gate.e_score_correction_bias", "F32", (experts,), s
        if latent:
            yield f"{b}routed_expert_down_proj.weight", "BF16", (wide, h), s
            yield f"{b}routed_expert_up_proj.weight", "BF16", (h, wide), s
        if latent and c["latent_moe_use_norm"]:
            yield f"{b}routed_expert_norm.weight", "BF16", (wide,), s
        if c["num_shared_experts"]:
            for name, shape in _glu(f"{b}shared_experts.", h, c["num_shared_experts"] * inner):
                yield name, "BF16", shape, s
        for expert in range(experts):
            for part, (rows, cols) in (
                ("w1", (inner, wide)), ("w2", (wide, inner)), ("w3", (inner, wide)),
            ):  # fmt: skip
                e = f"{b}experts.{expert}.{part}.weight"
                if packed:
                    yield f"{e}_packed", "U8", (rows, cols // 2), s
                    yield f"{e}_scale", "U8", (rows, -(-cols // 32)), s
                else:
                    yield e, "BF16", (rows, cols), s


def _k3_vision(shard: int) -> Iterator[Entry]:
    v, inner, wide = 1024, 4096, 1536
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (v, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, v),
        "vision_tower.encoder.final_layernorm.weight": (v,),
        "mm_projector.proj.0.weight": (inner, inner),
        "mm_projector.proj.2.weight": (7168, inner),
        "mm_projector.post_norm.weight": (7168,),
    }
    for block in range(27):
        p = f"vision_tower.encoder.blocks.{block}."
        shapes |= {
            f"{p}norm0.weight": (v,),
            f"{p}norm1.weight": (v,),
            f"{p}wqkv.weight": (3 * wide, v),
            f"{p}wo.weight": (v, wide),
            f"{p}mlp.fc0.weight": (inner, v),
            f"{p}mlp.fc1.weight": (v, inner),
        }
    for name, shape in shapes.items():
        yield name, "BF16", shape, shard


def kimi_k3_tensors() -> Iterator[Entry]:
    text = kimi_k3_config()["text_config"]
    yield from kimi_text_tensors(text, "language_model.", lambda layer: layer + 1)
    yield from _k3_vision(96)


def kimi_linear_tensors() -> Iterator[Entry]:
    yield from kimi_text_tensors(kimi_linear_config(), "", lambda layer: layer * 20 // 29 + 1)


def deepseek_v3_tensors() -> Iterator[Entry]:
    tensors = list(deepseek_text_tensors(deepseek_v3_config(), True))
    for number, (name, dtype, shape) in enumerate(tensors):
        yield name, dtype, shape, number * 163 // len(tensors) + 1


def deepseek_text_tensors(c: dict, fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """All names of a V2 or V3 style checkpoint, multi-token prediction module included."""
    h, heads, q, r, vocab, count, experts, inner = (
        c[k]
        for k in (
            "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "vocab_size",
            "num_hidden_layers", "n_routed_experts", "moe_intermediate_size",
        )
    )  # fmt: skip
    dn, dr, dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]

    def linear(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield name, "F8_E4M3" if fp8 else "BF16", shape
        if fp8:
            yield f"{name}_scale_inv", "F32", (-(-shape[0] // 128), -(-shape[1] // 128))

    yield "model.embed_tokens.weight", "BF16", (vocab, h)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", "BF16", (vocab, h)
    yield "model.norm.weight", "BF16", (h,)
    for layer in range(count + c.get("num_nextn_predict_layers", 0)):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{name}.weight", "BF16", (h,)
        a = f"{p}self_attn."
        if q:
            yield from linear(f"{a}q_a_proj.weight", (q, h))
            yield f"{a}q_a_layernorm.weight", "BF16", (q,)
            yield from linear(f"{a}q_b_proj.weight", (heads * (dn + dr), q))
        else:
            yield from linear(f"{a}q_proj.weight", (heads * (dn + dr), h))
        yield from linear(f"{a}kv_a_proj_with_mqa.weight", (r + dr, h))
        yield f"{a}kv_a_layernorm.weight", "BF16", (r,)
        yield from linear(f"{a}kv_b_proj.weight", (heads * (dn + dv), r))
        yield from linear(f"{a}o_proj.weight", (h, heads * dv))
        if not _routed(c, layer):
            for name, shape in _glu(f"{p}mlp.", h, c["intermediate_size"]):
                yield from linear(name, shape)
            continue
        yield f"{p}mlp.gate.weight", "BF16", (experts, h)
        if c["scoring_func"] == "sigmoid":
            yield f"{p}mlp.gate.e_score_correction_bias", "F32", (experts,)
        if c["n_shared_experts"]:
            for name, shape in _glu(f"{p}mlp.shared_experts.", h, c["n_shared_experts"] * inner):
                yield from linear(name, shape)
        for expert in range(experts):
            for name, shape in _glu(f"{p}mlp.experts.{expert}.", h, inner):
                yield from linear(name, shape)
        if layer < count:
            continue
        yield f"{p}embed_tokens.weight", "BF16", (vocab, h)
        yield f"{p}enorm.weight", "BF16", (h,)
        yield f"{p}hnorm.weight", "BF16", (h,)
        yield f"{p}eh_proj.weight", "BF16", (h, 2 * h)
        yield f"{p}shared_head.norm.weight", "BF16", (h,)
        yield f"{p}shared_head.head.weight", "BF16", (vocab, h)


MODELS = {
    "kimi_k3": (kimi_k3_config, kimi_k3_tensors),
    "deepseek_v3": (deepseek_v3_config, deepseek_v3_tensors),
    "kimi_linear": (kimi_linear_config, kimi_linear_tensors),
}


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    count = DTYPE_BYTES[dtype]
    for dim in shape:
        count *= dim
    return count


def write_sparse_model(name: str, directory: Path) -> Path:
    """One of MODELS, in `directory`."""
    config, tensors = MODELS[name]
    return write_sparse(config(), tensors(), directory)


def write_sparse(config: dict[str, object], tensors: Iterable[Entry], directory: Path) -> Path:
    """Writes config, index and shards with holes for data."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    shards: dict[int, dict[str, object]] = {}
    ends: dict[int, int] = {}
    for tensor, dtype, shape, shard in tensors:
        begin = ends.get(shard, 0)
        ends[shard] = begin + size_of(dtype, shape)
        shards.setdefault(shard, {})[tensor] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin, ends[shard]],
        }
    weight_map = {}
    for number, shard in enumerate(sorted(shards), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        raw = json.dumps(shards[shard]).encode()
        with open(directory / file, "wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + ends[shard])
        weight_map.update(dict.fromkeys(shards[shard], file))
    index = {"metadata": {"total_size": sum(ends.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


if __name__ == "__main__":
    write_sparse_model(sys.argv[1], Path(sys.argv[2]))
